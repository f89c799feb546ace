from torch.autograd import *
