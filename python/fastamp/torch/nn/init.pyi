from torch.nn.init import *
