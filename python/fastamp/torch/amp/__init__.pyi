# SPDX-License-Identifier: Apache-2.0
from fastamp.amp import *
from fastamp.amp import GradScaler as GradScaler
from fastamp.torch.amp import autocast_mode as autocast_mode
from fastamp.torch.amp import grad_scaler as grad_scaler
