# SPDX-License-Identifier: Apache-2.0
# isort: skip_file
# Names of fastamp come first: a later star import leaves them.
from fastamp.torch.nn import utils as utils
from torch.nn import *  # type: ignore[no-redef]
from torch.nn import functional as functional
from torch.nn import init as init
from torch.nn import modules as modules
from torch.nn import parallel as parallel
from torch.nn import parameter as parameter
