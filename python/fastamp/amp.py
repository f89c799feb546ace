# SPDX-License-Identifier: Apache-2.0
"""Mirror of ``torch.amp``, and the spellings that articles teach.

``autocast``, ``GradScaler``, ``custom_fwd`` and ``custom_bwd`` are fastamp's; ``scale_loss`` and
``master_params`` are those of NVIDIA apex.
"""

from torch.amp.autocast_mode import is_autocast_available

from fastamp._autocast.custom_function import custom_bwd, custom_fwd
from fastamp._autocast.region import autocast
from fastamp._scaler.apex import loss_scaler, master_params, scale_loss
from fastamp._scaler.grad_scaler import GradScaler

__all__ = [
    "GradScaler",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "is_autocast_available",
    "loss_scaler",
    "master_params",
    "scale_loss",
]
