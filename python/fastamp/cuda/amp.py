"""Mirror of ``torch.cuda.amp``, which torch deprecates; new code uses ``fastamp.amp``."""

from __future__ import annotations

import torch.cuda.amp.grad_scaler

import fastamp.grad_scaler

__all__ = ["GradScaler"]


# torch's class comes first: its __init__ has the arguments and the warning, and goes on to ours.
class GradScaler(torch.cuda.amp.grad_scaler.GradScaler, fastamp.grad_scaler.GradScaler):
    """``fastamp.GradScaler("cuda")`` with the arguments of ``torch.cuda.amp.GradScaler``.

    Warns:
        FutureWarning: Always, as torch's: the spelling is deprecated.
    """
