# SPDX-License-Identifier: Apache-2.0
from torch.amp.grad_scaler import OptState as OptState

from fastamp.amp import GradScaler as GradScaler
