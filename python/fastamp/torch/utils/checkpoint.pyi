from torch.utils.checkpoint import *
