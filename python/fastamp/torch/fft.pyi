from torch.fft import *
