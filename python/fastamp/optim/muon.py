# SPDX-License-Identifier: Apache-2.0
"""Muon in two passes over memory, with its matrix products in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import fastamp._C as _C
from fastamp.optim._fused import FusedOptimizer
from fastamp.optim._layout import MASTER, MOMENTUM, MUON_STORED, REMAINDER, complete_muon

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT


class Muon(FusedOptimizer, torch.optim.Muon):  # type: ignore[misc]  # torch's _init_group differs
    """``torch.optim.Muon`` with a fused step: same arguments, param groups, state and results.

    For the weight matrices of hidden layers; another optimizer steps all else. Momentum of all
    matrices is one pass, and so is what changes the weights; in between, the Newton-Schulz
    iteration multiplies matrices of equal shape together. fp16 and bf16 parameters follow fp32
    masters kept in the state. Behind a ``fastamp.GradScaler`` the first pass unscales and clips,
    and the second is skipped on overflow, without waiting for the device. "Muon" in docs/optim.md
    has what differs from torch. Not thread-safe.

    Args:
        params: Parameters of two dimensions, named parameters, or dicts of parameter groups.
        lr: Learning rate; a tensor of one element is read on its device.
        weight_decay: Decoupled weight decay.
        momentum: Factor of the momentum buffer.
        nesterov: Nesterov's momentum.
        ns_coefficients: Three numbers: the polynomial of the Newton-Schulz iteration.
        eps: The least norm that a matrix is divided by.
        ns_steps: Iterations, less than 100.
        adjust_lr_fn: How a matrix's shape changes its learning rate: ``"original"`` (also
            ``None``), ``"match_rms_adamw"``, or from torch 2.14 on ``"spectral_unclamped"``.
        ns_dtype: dtype of the iteration: ``torch.bfloat16`` (also ``None``), ``torch.float16``, for
            devices whose regions are in float16, or ``torch.float32``. May differ by group.
        state_dtype: dtype of momentum buffers: ``torch.float32`` (also ``None``) or
            ``torch.bfloat16``. May differ by group.
        master: As for ``fastamp.optim.SGD``.
        autocast_dtype: As for ``fastamp.optim.SGD``.

    Raises:
        ValueError: A hyperparameter is out of its range, ``params`` is empty, or a parameter has
            not two dimensions.
        TypeError: ``params`` holds something else than tensors.
    """

    _torch_class = torch.optim.Muon
    _native_step = staticmethod(_C.muon_step)
    _complete_state = staticmethod(complete_muon)
    _stored_checks = MUON_STORED

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        master: str | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        """Checks the options; state is created at the first step."""
        torch.optim.Muon.__init__(
            self,
            params,
            lr,  # type: ignore[arg-type]  # a tensor, as torch documents it
            weight_decay,
            momentum,
            nesterov,
            ns_coefficients,
            eps,
            ns_steps,
            adjust_lr_fn,
        )
        self._fastamp_check_stored("Muon", self.defaults)
        self._finish_init(
            "Muon", autocast_dtype, ns_dtype=ns_dtype, state_dtype=state_dtype, master=master
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters.

        Args:
            param_group: "params", and the options that differ from the optimizer's defaults.

        Raises:
            ValueError: As torch's optimizers, an option is none that there is, or a parameter has
                not two dimensions. Nothing was changed.
        """
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.ndim != 2:
                del self.param_groups[-1]
                raise ValueError(
                    "Muon only supports 2D parameters whereas we found a parameter with size: "
                    f"{param.size()}; step it by another optimizer"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Refuses what ``load_state_dict`` was given if it is another optimizer's."""
        if "_fastamp_source" in self.__dict__:
            _check_is_muons(state)
        super().__setstate__(state)


def _check_is_muons(state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        if "ns_steps" not in group:
            raise ValueError(
                "load_state_dict: expected the state of a Muon, got param groups without "
                f"'ns_steps', with {sorted(key for key in group if key != 'params')}"
            )
        for param in group["params"]:
            entries = state["state"].get(param, {})
            for key in (MOMENTUM, MASTER, REMAINDER):
                value = entries.get(key)
                if isinstance(value, torch.Tensor) and value.shape != param.shape:
                    raise ValueError(
                        f"load_state_dict: expected {key} of shape {tuple(param.shape)}, that of "
                        f"its parameter, got {tuple(value.shape)}"
                    )
