"""Mirror of ``torch.cpu.amp``, which torch deprecates; new code uses ``fastamp.amp``."""

from __future__ import annotations

import torch.cpu.amp.grad_scaler

import fastamp.grad_scaler

__all__ = ["GradScaler"]


# torch's class comes first: its __init__ has the arguments and the warning, and goes on to ours.
class GradScaler(torch.cpu.amp.grad_scaler.GradScaler, fastamp.grad_scaler.GradScaler):
    """``fastamp.GradScaler("cpu")`` with the arguments of ``torch.cpu.amp.GradScaler``.

    Warns:
        FutureWarning: Always, as torch's: the spelling is deprecated.
    """
