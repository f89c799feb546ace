from torch.fx import *
