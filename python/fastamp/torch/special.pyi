from torch.special import *
