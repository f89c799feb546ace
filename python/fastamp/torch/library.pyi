from torch.library import *
