from torch.export import *
