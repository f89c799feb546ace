from torch.func import *
