from torch.testing import *
