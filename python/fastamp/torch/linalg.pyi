from torch.linalg import *
