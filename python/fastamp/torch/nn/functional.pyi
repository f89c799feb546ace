from torch.nn.functional import *
