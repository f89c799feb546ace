# SPDX-License-Identifier: Apache-2.0
from torch.utils import *
from torch.utils import checkpoint as checkpoint
from torch.utils import data as data
