# SPDX-License-Identifier: Apache-2.0
"""Adam in one pass over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

import fastamp._C as _C
from fastamp.optim._fused import FusedOptimizer
from fastamp.optim._layout import complete_adam

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT

    from fastamp._C import StepGate


class Adam(FusedOptimizer, torch.optim.Adam):
    """``torch.optim.Adam`` with a fused step: same arguments, param groups, state and results.

    See ``fastamp.optim.SGD`` for what the step does, and docs/optim.md for what differs from torch.

    Args:
        params: Parameters, named parameters, or dicts of parameter groups.
        lr: Learning rate; a tensor of one element is read on its device.
        betas: Decay rates of the two moments. Tensors are read by the host.
        eps: Added to the denominator.
        weight_decay: L2 penalty, or AdamW's decay with ``decoupled_weight_decay``.
        amsgrad: Divides by the largest second moment so far.
        foreach: Accepted; there is one implementation.
        maximize: Ascends instead.
        capturable: Accepted; the step can always be captured in a CUDA graph.
        differentiable: Autograd through the step; torch's own implementation runs then.
        fused: Accepted; the step is always fused.
        decoupled_weight_decay: Decay acts on the weights themselves, as in AdamW.
        state_dtype: dtype of the moments: ``torch.float32`` (also ``None``) or ``torch.bfloat16``,
            which needs a second beta of at most 0.99. May differ by group.
        autocast_dtype: ``torch.bfloat16`` or ``torch.float16``, the dtype of the autocast regions:
            the step writes the casts of the weights too, and regions cast none. ``None``: it writes
            none. See "Weight copies" in docs/optim.md for the one danger.

    Raises:
        ValueError: A hyperparameter is out of its range, or ``params`` is empty.
        TypeError: ``params`` holds something else than tensors.
        RuntimeError: ``fused`` came with ``foreach`` or ``differentiable``.

    Warns:
        UserWarning: ``state_dtype`` is bfloat16 and the second beta above 0.99, in any group.
    """

    _torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    _complete_state = staticmethod(complete_adam)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        """Checks the options; state is created at the first step."""
        self._fastamp_is_being_made = True
        torch.optim.Adam.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._finish_init("Adam", state_dtype, autocast_dtype)

    def _native_step(self, gate: StepGate | None) -> list[tuple[int, Tensor]]:
        return _C.adam_step(self, gate)
