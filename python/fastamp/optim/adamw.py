# SPDX-License-Identifier: Apache-2.0
"""AdamW in one pass over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastamp.optim.adam import Adam

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT


class AdamW(Adam, torch.optim.AdamW):
    """``torch.optim.AdamW`` with a fused step: same arguments, param groups, state and results.

    See ``fastamp.optim.Adam`` for arguments and errors.
    """

    _torch_class = torch.optim.AdamW

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
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
            decoupled_weight_decay=True,
        )
        self._finish_init(
            "AdamW",
            autocast_dtype,
            state_dtype=state_dtype,
            state_rounding=state_rounding,
            master=master,
        )
