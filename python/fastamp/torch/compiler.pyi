from torch.compiler import *
