from torch.nn.parallel import *
