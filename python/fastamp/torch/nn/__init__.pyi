from torch.nn import *
from torch.nn import functional as functional
from torch.nn import init as init
from torch.nn import modules as modules
from torch.nn import parallel as parallel
from torch.nn import parameter as parameter
from torch.nn import utils as utils
