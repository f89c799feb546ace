from torch.profiler import *
