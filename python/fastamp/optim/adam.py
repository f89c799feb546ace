# SPDX-License-Identifier: Apache-2.0
"""Adam in one pass over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

import fastamp._C as _C
from fastamp.optim._fused import FusedOptimizer
from fastamp.optim._layout import ADAM_STORED, complete_adam

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT


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
        state_dtype: dtype of the moments: ``torch.float32`` (also ``None``), ``torch.bfloat16``, or
            ``"8bit"``, a byte each, whose steps are at most 1.2 times as long as float32 moments
            would make them: see "Moments in 8 bits" in docs/optim.md. Where they do not fit, and in
            groups with ``amsgrad``, moments are then in bfloat16, rounded stochastically. May
            differ by group.
        state_rounding: Of bfloat16 moments: ``"stochastic"`` (also ``None``), by noise that is the
            same on all devices and replicas and after a resume, or ``"nearest"``, as torch's fused
            Adam does it from 2.12 on, which needs betas of at most 0.99. First moments with a first
            beta of at most 0.9375 are rounded to nearest. May differ by group.
        master: How float32 masters of 16-bit parameters are kept: ``"float32"`` (also ``None``),
            or ``"remainder"``, in two bytes, exactly but for rare ties: see "Masters in two bytes"
            in docs/optim.md. May differ by group.
        autocast_dtype: ``torch.bfloat16``, ``torch.float16`` or ``torch.float8_e4m3fn``, the dtype
            of the autocast regions: the step writes the casts of the weights too, and regions cast
            none. ``None``: it writes none. See "Weight copies" in docs/optim.md for the one danger.

    Raises:
        ValueError: A hyperparameter is out of its range, or ``params`` is empty.
        TypeError: ``params`` holds something else than tensors.
        RuntimeError: ``fused`` came with ``foreach`` or ``differentiable``.

    Warns:
        UserWarning: In any group, ``state_dtype`` is bfloat16, ``state_rounding`` is ``"nearest"``
            and a beta is above 0.99.
    """

    _torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    _native_step = staticmethod(_C.adam_step)
    _complete_state = staticmethod(complete_adam)
    _stored_checks = ADAM_STORED

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
        state_dtype: torch.dtype | str | None = None,
        state_rounding: str | None = None,
        master: str | None = None,
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
        self._finish_init(
            "Adam",
            autocast_dtype,
            state_dtype=state_dtype,
            state_rounding=state_rounding,
            master=master,
        )
