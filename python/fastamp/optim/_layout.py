# SPDX-License-Identifier: Apache-2.0
"""How the optimizers store state: torch's fused=True layout, fp32 moments, masters of 16 bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

MASTER = "master_param"
MOMENTUM = "momentum_buffer"
# How many steps a momentum buffer has seen. At 0 its contents are ignored: whether the first step
# was skipped is known on the device only.
MOMENTUM_STEPS = "momentum_steps"
MOMENTS = frozenset({MOMENTUM, "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
STEPS = frozenset({"step", MOMENTUM_STEPS})

_NARROW = (torch.float16, torch.bfloat16)


def has_master(param: Tensor) -> bool:
    """Whether a parameter follows an fp32 copy of itself."""
    return param.dtype in _NARROW


def is_ours(param: Tensor, group: dict[str, Any]) -> bool:
    """Whether the state of a parameter has our layout; otherwise it is left to torch."""
    return not group["differentiable"] and (param.dtype is torch.float32 or has_master(param))


def has_repeats(param_groups: list[dict[str, Any]]) -> bool:
    """Whether a group lists a parameter twice; torch warns of it and allows it."""
    return any(len(set(map(id, g["params"]))) < len(g["params"]) for g in param_groups)


def check_state_dtype(function: str, dtype: Any) -> None:
    """Refuses dtypes that moments cannot have with a ValueError."""
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise ValueError(
            f"{function}: expected state_dtype to be None, torch.float32 or torch.bfloat16, "
            f"got {dtype!r}"
        )


def warn_of_narrow_moments(
    function: str, groups: Iterable[dict[str, Any]], *, stacklevel: int
) -> None:
    """Warns once if a second moment has a dtype that is too coarse for the change of one step.

    Args:
        function: What the user called.
        groups: Parameter groups, of Adam or of others.
        stacklevel: That of the user's line, seen from the caller.
    """
    for group in groups:
        if group.get("state_dtype") is not torch.bfloat16 or "betas" not in group:
            continue
        beta2 = float(group["betas"][1])
        if beta2 > 0.99:
            warnings.warn(
                f"{function}: state_dtype=torch.bfloat16 cannot follow betas[1] = {beta2:g}: a "
                "step changes the second moment by less than half a unit of bfloat16, so that "
                "updates stay nearly five times too small after gradients fell tenfold. Use "
                "state_dtype=None, or betas[1] <= 0.99.",
                stacklevel=stacklevel + 1,
            )
            return


def moment_dtype(group: dict[str, Any]) -> torch.dtype:
    """The dtype of the moments of a group's parameters."""
    dtype: torch.dtype | None = group.get("state_dtype")
    return torch.float32 if dtype is None else dtype


def wanted_dtype(key: Any, group: dict[str, Any]) -> torch.dtype | None:
    """The dtype of an entry of a parameter's state; ``None`` for entries that are not ours."""
    if key in MOMENTS:
        return moment_dtype(group)
    return torch.float32 if key in STEPS or key == MASTER else None


def adopt(param: Tensor, group: dict[str, Any], state: dict[Any, Any], source: Any = None) -> None:
    """Brings a parameter's state into our layout, in place.

    Args:
        param: A parameter whose state has our layout.
        group: Its group.
        state: Its state, from torch's optimizers or ours, maybe rounded to the parameter's dtype.
        source: The state it was made from, before that rounding.
    """
    if source is None:
        source = state
    for key in list(state):
        dtype = wanted_dtype(key, group)
        value = source.get(key)
        if not isinstance(value, torch.Tensor):  # Old checkpoints count in numbers.
            value = state[key]
        if dtype is None or not isinstance(value, torch.Tensor):
            continue
        state[key] = value.detach().to(device=param.device, dtype=dtype)
    if isinstance(state.get(MOMENTUM), torch.Tensor) and MOMENTUM_STEPS not in state:
        state[MOMENTUM_STEPS] = _count(param, 1.0)


def _count(param: Tensor, value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=param.device)


def _moment(param: Tensor, group: dict[str, Any]) -> Tensor:
    return torch.zeros_like(
        param, dtype=moment_dtype(group), memory_format=torch.preserve_format
    ).detach()


def _complete_master(param: Tensor, state: dict[Any, Any]) -> None:
    if has_master(param) and MASTER not in state:
        state[MASTER] = param.detach().float()


def complete_sgd(param: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> None:
    """Creates what an SGD step of a parameter needs and its state lacks."""
    _complete_master(param, state)
    if group["momentum"] == 0:
        return
    if not isinstance(state.get(MOMENTUM), torch.Tensor):
        state[MOMENTUM] = _moment(param, group)
        state[MOMENTUM_STEPS] = _count(param, 0.0)


def complete_adam(param: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> None:
    """Creates what an Adam step of a parameter needs and its state lacks."""
    if "step" not in state:
        state["step"] = _count(param, 0.0)
    for key in ("exp_avg", "exp_avg_sq"):
        if key not in state:
            state[key] = _moment(param, group)
    if group["amsgrad"] and "max_exp_avg_sq" not in state:
        state["max_exp_avg_sq"] = _moment(param, group)
    _complete_master(param, state)
