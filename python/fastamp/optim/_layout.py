# SPDX-License-Identifier: Apache-2.0
"""Layout of the optimizers' state: torch's fused=True, fp32 moments, masters of 16 bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

import fastamp._C as _C
from fastamp.optim._codes import (
    CODES,
    EIGHT_BITS,
    change_moments,
    decoded,
    group_of_codes,
    moment_dtype,
)
from fastamp.optim._flashoptim import ERROR_BITS, as_integers, master_from_error_bits
from fastamp.optim._remainders import join, split

if TYPE_CHECKING:
    from torch import Tensor

MASTER = "master_param"
# What a 16-bit parameter lacks of its master, as int16: in place of the master in groups with
# ``master="remainder"``. Under the name of the master, Transformer Engine stores the same.
REMAINDER = "master_remainder"
#: Whatever says what the master is. A state has one of them at most.
MASTERS = frozenset({MASTER, REMAINDER, ERROR_BITS})
MOMENTUM = "momentum_buffer"
# How many steps a momentum buffer has seen. At 0 its contents are ignored: whether the first step
# was skipped is known on the device only. Muon's, which start as zeros, have it in bfloat16 only.
MOMENTUM_STEPS = "momentum_steps"
MOMENTS = frozenset({MOMENTUM, "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
STEPS = frozenset({"step", MOMENTUM_STEPS})

_NARROW = (torch.float16, torch.bfloat16)
_DTYPES = {str(dtype): dtype for dtype in (*_NARROW, torch.float32)}


def has_master(param: Tensor) -> bool:
    """Whether a parameter follows an fp32 copy of itself."""
    return param.dtype in _NARROW


def is_stepped_by_kernel(param: Tensor, group: dict[str, Any]) -> bool:
    """Whether the state of a parameter has our layout; otherwise it is left to torch."""
    # Muon's groups have no "differentiable".
    takes = param.dtype is torch.float32 or has_master(param)
    return takes and not group.get("differentiable", False)


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


def check_moments_dtype(function: str, dtype: Any) -> None:
    """Refuses what Adam's moments cannot be with a ValueError."""
    if dtype not in (None, torch.float32, torch.bfloat16, EIGHT_BITS):
        raise ValueError(
            f"{function}: expected state_dtype to be None, torch.float32, torch.bfloat16 or "
            f"{EIGHT_BITS!r}, got {dtype!r}"
        )


def check_state_rounding(function: str, rounding: Any) -> None:
    """Refuses roundings that moments cannot have with a ValueError."""
    if rounding not in (None, "stochastic", "nearest"):
        raise ValueError(
            f"{function}: expected state_rounding to be None, 'stochastic' or 'nearest', "
            f"got {rounding!r}"
        )


def check_master(function: str, master: Any) -> None:
    """Refuses ways to keep masters that there are not with a ValueError."""
    if master not in (None, "float32", "remainder"):
        raise ValueError(
            f"{function}: expected master to be None, 'float32' or 'remainder', got {master!r}"
        )


def check_ns_dtype(function: str, dtype: Any) -> None:
    """Refuses dtypes that a Newton-Schulz iteration cannot have with a ValueError."""
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"{function}: expected ns_dtype to be None, torch.float16, torch.bfloat16 or "
            f"torch.float32, got {dtype!r}"
        )


def _known_rates() -> tuple[str, ...]:
    # torch's step takes words that it does not know for a ratio of 1; it is asked for the newest.
    known = ("original", "match_rms_adamw")
    try:
        from torch.optim._muon import _adjust_lr
    except ImportError:  # Before torch 2.9 there is no Muon.
        return known
    ratio = _adjust_lr(1.0, "spectral_unclamped", torch.Size((1, 4)))
    return (*known, "spectral_unclamped") if ratio == 0.5 else known


def check_adjust_lr_fn(function: str, name: Any) -> None:
    """Refuses what the installed torch's Muon or fastamp's does not multiply rates by."""
    known = _known_rates()
    if name is not None and name not in known:
        words = ", ".join(map(repr, known))
        raise ValueError(
            f"{function}: expected adjust_lr_fn to be None or of {words}, got {name!r}"
        )


# Options of groups that torch's do not have. A group without one stores its state as by default.
STORED = {
    "ns_dtype": check_ns_dtype,
    "state_dtype": check_state_dtype,
    "state_rounding": check_state_rounding,
    "master": check_master,
}


def with_dtypes_as_text(group: dict[str, Any]) -> dict[str, Any]:
    """A saved group; torch.distributed.checkpoint's full state dicts take no dtypes."""
    dtypes = {key: str(group[key]) for key in STORED if isinstance(group.get(key), torch.dtype)}
    return {**group, **dtypes}


def with_dtypes(group: dict[str, Any]) -> dict[str, Any]:
    """Inverts it. Other texts stay, and are refused where options are checked."""
    texts = {key: group[key] for key in STORED if isinstance(group.get(key), str)}
    return {**group, **{k: _DTYPES[text] for k, text in texts.items() if text in _DTYPES}}


#: Adam's: its moments may be codes.
ADAM_STORED = {**STORED, "state_dtype": check_moments_dtype}

#: Muon's: torch checks the words of this option in its constructor only.
MUON_STORED = {**STORED, "adjust_lr_fn": check_adjust_lr_fn}


# Of the first moment and the second.
_NARROW_EFFECTS = (
    "the first moment by less than half a unit of bfloat16, so that updates go on long after "
    "gradients are gone",
    "the second moment by less than half a unit of bfloat16, so that updates stay nearly five "
    "times too small after gradients fell tenfold",
)


def warn_of_narrow_moments(
    function: str, groups: Iterable[dict[str, Any]], *, stacklevel: int
) -> None:
    """Warns once if a moment is rounded more coarsely than the change of one step.

    Args:
        function: What the user called.
        groups: Parameter groups, of Adam or of others.
        stacklevel: That of the user's line, seen from the caller.
    """
    for group in groups:
        if group.get("state_dtype") is not torch.bfloat16 or "betas" not in group:
            continue
        if group.get("state_rounding") != "nearest":
            continue
        for index, effect in enumerate(_NARROW_EFFECTS):
            beta = float(group["betas"][index])
            if beta > 0.99:
                warnings.warn(
                    f"{function}: state_dtype=torch.bfloat16 with state_rounding='nearest' cannot "
                    f"follow betas[{index}] = {beta:g}: a step changes {effect}. Use "
                    f"state_rounding='stochastic', or betas[{index}] <= 0.99.",
                    stacklevel=stacklevel + 1,
                )
                return


def wanted_dtype(key: Any, param: Tensor, group: dict[str, Any]) -> torch.dtype | None:
    """The dtype of an entry of a parameter's state; ``None`` for entries that are not fastamp's."""
    if key in MOMENTS:
        # Moments that will be codes are rounded once.
        return torch.float32 if _has_codes(param, group) else moment_dtype(group)
    if key in CODES:
        return torch.uint8
    if key == REMAINDER:
        return torch.int16
    return torch.float32 if key in STEPS or key == MASTER else None


def adopt(param: Tensor, group: dict[str, Any], state: dict[Any, Any], source: Any = None) -> None:
    """Brings a parameter's state into our layout, in place.

    Args:
        param: A parameter whose state has our layout.
        group: Its group.
        state: Its state, from torch's optimizers or fastamp's, maybe rounded to the parameter's
            dtype.
        source: The state it was made from, before that rounding.
    """
    if source is None:
        source = state
    if has_master(param) and not MASTERS.isdisjoint(source):
        _C.forget_starting_masters([param])  # What was loaded counts.
    for key in list(state):
        dtype = wanted_dtype(key, param, group)
        value = source.get(key)
        if not isinstance(value, torch.Tensor):  # Old checkpoints count in numbers.
            value = state[key]
        if key == ERROR_BITS and isinstance(value, torch.Tensor):
            state[key] = as_integers(value.detach(), group).to(param.device)
        if dtype is None or not isinstance(value, torch.Tensor):
            continue
        if key == MASTER and value.dtype is torch.int16:
            state[REMAINDER] = state.pop(MASTER)
            key, dtype = REMAINDER, torch.int16
        state[key] = value.detach().to(device=param.device, dtype=dtype)
    # Muon's buffers start as zeros and need no count.
    counts = "dampening" in group and MOMENTUM_STEPS not in state
    if counts and isinstance(state.get(MOMENTUM), torch.Tensor):
        state[MOMENTUM_STEPS] = _count(param, 1.0)


def in_torchs_layout(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict in the layout of torch's optimizers for float32 parameters."""
    states = {}
    for param, state in state_dict["state"].items():
        steps = state.get(MOMENTUM_STEPS)
        # Whether the buffer holds anything is asked once, for a checkpoint.
        is_empty = steps is not None and float(steps) == 0
        left_out = MASTERS.union(CODES, {MOMENTUM_STEPS}) | ({MOMENTUM} if is_empty else set())
        states[param] = {
            key: value.float() if key in MOMENTS else value
            for key, value in state.items()
            if key not in left_out
        }
        if CODES[0] in state:
            states[param].update(decoded(state[CODES[0]], state))
    groups = [
        {key: value for key, value in group.items() if key not in STORED}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": states, "param_groups": groups}


def _has_codes(param: Tensor, group: dict[str, Any]) -> bool:
    return "amsgrad" in group and group_of_codes(param, group) != 0


def _count(param: Tensor, value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=param.device)


def _moment(param: Tensor, group: dict[str, Any]) -> Tensor:
    return torch.zeros_like(
        param, dtype=moment_dtype(group), memory_format=torch.preserve_format
    ).detach()


def _complete_master(param: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> None:
    # Not when a checkpoint is loaded: the weights may be loaded later.
    if not has_master(param):
        return
    bits = state.pop(ERROR_BITS, None)
    if bits is not None:
        state[MASTER] = master_from_error_bits(param, bits)
    if group.get("master") == "remainder":
        if REMAINDER not in state:
            master = state[MASTER] if MASTER in state else _C.kept_starting_master(param)
            state[REMAINDER] = _no_remainder(param) if master is None else split(param, master)
        state.pop(MASTER, None)
    else:
        if MASTER not in state:
            state[MASTER] = (
                join(param, state[REMAINDER]) if REMAINDER in state else first_master(param)
            )
        state.pop(REMAINDER, None)


def _no_remainder(param: Tensor) -> Tensor:
    return torch.zeros_like(param, dtype=torch.int16, memory_format=torch.preserve_format).detach()


def first_master(param: Tensor) -> Tensor:
    """The master that a 16-bit parameter starts from. Who keeps it forgets the starting master."""
    starting = _C.kept_starting_master(param)
    return param.detach().float() if starting is None else starting


def complete_sgd(param: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> None:
    """Creates what an SGD step of a parameter needs and its state lacks."""
    _complete_master(param, group, state)
    if group["momentum"] == 0:
        return
    if not isinstance(state.get(MOMENTUM), torch.Tensor):
        state[MOMENTUM] = _moment(param, group)
        state[MOMENTUM_STEPS] = _count(param, 0.0)


def complete_muon(param: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> None:
    """Creates what a Muon step of a parameter needs and its state lacks."""
    steps = 1.0
    if not isinstance(state.get(MOMENTUM), torch.Tensor):
        state[MOMENTUM], steps = _moment(param, group), 0.0
    if moment_dtype(group) is torch.float32:
        state.pop(MOMENTUM_STEPS, None)
    elif MOMENTUM_STEPS not in state:  # Noise is made of it.
        state[MOMENTUM_STEPS] = _count(param, steps)
    _complete_master(param, group, state)


def complete_adam(param: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> None:
    """Creates what an Adam step of a parameter needs and its state lacks."""
    if "step" not in state:
        state["step"] = _count(param, 0.0)
    change_moments(param, group, state)
    if CODES[0] not in state:
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = _moment(param, group)
    if group["amsgrad"] and "max_exp_avg_sq" not in state:
        state["max_exp_avg_sq"] = _moment(param, group)
    _complete_master(param, group, state)
