# SPDX-License-Identifier: Apache-2.0
from fastamp.cpu.amp import *
from fastamp.torch.cpu.amp import autocast_mode as autocast_mode
from fastamp.torch.cpu.amp import grad_scaler as grad_scaler
