# SPDX-License-Identifier: Apache-2.0
from torch.optim.lr_scheduler import *
