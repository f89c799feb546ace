from torch.utils.data import *
