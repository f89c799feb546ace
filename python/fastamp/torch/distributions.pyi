from torch.distributions import *
