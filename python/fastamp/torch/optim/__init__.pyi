# SPDX-License-Identifier: Apache-2.0
from torch.optim import *
from torch.optim import lr_scheduler as lr_scheduler
from torch.optim import swa_utils as swa_utils
