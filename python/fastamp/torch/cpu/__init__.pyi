# SPDX-License-Identifier: Apache-2.0
# isort: skip_file
# Names of fastamp come first: a later star import leaves them.
from fastamp.torch.cpu import amp as amp
from torch.cpu import *
