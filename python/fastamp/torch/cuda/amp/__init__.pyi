# SPDX-License-Identifier: Apache-2.0
from fastamp.cuda.amp import *
from fastamp.torch.cuda.amp import autocast_mode as autocast_mode
from fastamp.torch.cuda.amp import grad_scaler as grad_scaler
