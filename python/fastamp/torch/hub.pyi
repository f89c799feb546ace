from torch.hub import *
