from torch.distributed import *
