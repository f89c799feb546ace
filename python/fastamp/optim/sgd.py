# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent in one pass over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import fastamp._C as _C
from fastamp.optim._fused import FusedOptimizer
from fastamp.optim._layout import MOMENTUM, MOMENTUM_STEPS, complete_sgd

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT


class SGD(FusedOptimizer, torch.optim.SGD):
    """``torch.optim.SGD`` with a fused step: same arguments, param groups, state and results.

    All parameters of all groups and dtypes are updated in one pass. fp16 and bf16 parameters follow
    fp32 masters kept in the state. Behind a ``fastamp.GradScaler`` the same pass unscales, clips
    and skips, without waiting for the device. docs/optim.md lists what is stored and what differs
    from torch. Not thread-safe.

    Args:
        params: Parameters, named parameters, or dicts of parameter groups.
        lr: Learning rate; a tensor of one element is read on its device.
        momentum: Factor of the momentum buffer; 0 keeps none.
        dampening: 1 - factor of the gradient in it, from its second step on.
        weight_decay: L2 penalty.
        nesterov: Nesterov's momentum; needs ``momentum > 0`` and ``dampening == 0``.
        maximize: Ascends instead.
        foreach: Accepted; there is one implementation.
        differentiable: Autograd through the step; torch's own implementation runs then.
        fused: Accepted; the step is always fused.
        state_dtype: dtype of momentum buffers: ``torch.float32`` (also ``None``) or
            ``torch.bfloat16``. May differ by group.
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
    """

    _torch_class = torch.optim.SGD
    _native_step = staticmethod(_C.sgd_step)
    _complete_state = staticmethod(complete_sgd)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        master: str | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        """Checks the options; state is created at the first step."""
        torch.optim.SGD.__init__(
            self,
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self._finish_init("SGD", autocast_dtype, state_dtype=state_dtype, master=master)

    def state_dict(self, *, portable: bool = False) -> dict[str, Any]:
        """Returns state and param groups, as torch's: loadable by ``torch.optim.SGD``.

        A buffer whose first step was skipped holds no values yet. torch would dampen its first
        gradient, so it is left out where there is dampening; finding out waits for the device.

        Args:
            portable: With float32 buffers and without masters, as in ``fastamp.optim.AdamW``.
        """
        state_dict: dict[str, Any] = super().state_dict(portable=portable)
        for group in state_dict["param_groups"]:
            if group["momentum"] == 0 or group["dampening"] == 0:
                continue
            for key in group["params"]:
                entry = state_dict["state"].get(key, {})
                if MOMENTUM_STEPS in entry and entry[MOMENTUM_STEPS].item() == 0:
                    kept = {k: v for k, v in entry.items() if k != MOMENTUM_STEPS}
                    state_dict["state"][key] = kept | {MOMENTUM: None}
        return state_dict
