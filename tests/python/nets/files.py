# SPDX-License-Identifier: Apache-2.0
"""What is read from outside, damaged: each reader takes it, or refuses it and changes nothing.

A case is bytes, so that a fuzzer can drive it: a text as it is read, or for what is read as objects
a list of edits of a valid one.
"""

from __future__ import annotations

import copy
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fastamp
from fastamp._policy.policy_file import PolicyFile
from fastamp.optim import _fused
from support.scaler_pairs import snapshot

SEEDS = Path(__file__).resolve().parents[2] / "data" / "files"

#: What readers may raise. Other types are faults, as is anything that changed.
REFUSALS = (ValueError, TypeError, LookupError, RuntimeError, AssertionError)


class Edits:
    """Draws from bytes; 0 once they are used up."""

    def __init__(self, data: bytes) -> None:
        self.left = iter(data)

    def below(self, end: int) -> int:
        return next(self.left, 0) % end if end else 0

    def value(self) -> Any:
        return ODD_VALUES[self.below(len(ODD_VALUES))]()

    def edited(self, state: Any) -> Any:
        """A copy of a state of dicts and lists with up to four edits."""
        state = copy.deepcopy(state)
        for _ in range(1 + self.below(4)):
            state = self._edit(state, inside=True) if state else state
        return state

    def _edit(self, state: Any, inside: bool = False) -> Any:
        if isinstance(state, (dict, list)) and state and (inside or self.below(6)):
            keys = list(state) if isinstance(state, dict) else range(len(state))
            key = keys[self.below(len(keys))]
            how = self.below(4)
            if how == 0:
                del state[key]
            elif how == 1 and isinstance(state, list):
                state.append(state[key])
            else:
                state[key] = self._edit(state[key])
            return state
        if isinstance(state, torch.Tensor) and state.layout is torch.strided and self.below(2):
            return ODD_TENSORS[self.below(len(ODD_TENSORS))](state)
        return self.value()


ODD_VALUES: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: True,
    lambda: 0,
    lambda: -1,
    lambda: 1.5,
    lambda: 2**31,
    lambda: 2**63,
    lambda: 10**400,
    lambda: math.nan,
    lambda: math.inf,
    lambda: -math.inf,
    lambda: 5e-324,
    lambda: 1e300,
    lambda: "",
    lambda: "8bit",
    lambda: b"1",
    lambda: {},
    lambda: [],
    lambda: [[]],
    lambda: (0.9, 0.999),
    lambda: torch.bfloat16,
    lambda: torch.ones(()),
    lambda: torch.ones(3),
    lambda: torch.empty(0),
    lambda: torch.ones(2, 3, device="meta"),
    lambda: torch.ones((), dtype=torch.complex64),
    lambda: torch.ones(2).expand(3, 2),
    lambda: torch.ones(2, 3).to_sparse(),
    object,
)
ODD_TENSORS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda t: t.new_full(t.shape, math.nan if t.is_floating_point() else 127),
    lambda t: t.double(),
    lambda t: t.to(torch.int32),
    lambda t: t.bfloat16(),
    lambda t: t.flatten()[: t.numel() // 2],
    lambda t: t.new_zeros((*t.shape, 2))[..., 0],
    lambda t: t.reshape(-1),
    lambda t: t.to("meta"),
    lambda t: t.clone().requires_grad_() if t.is_floating_point() else t,
)


def refused(call: Callable[[], Any], seen: Callable[[], Any]) -> bool:
    """Whether a call refuses what it is given.

    Raises:
        ChangedError: It does so after it has changed something.
    """
    before = seen()
    try:
        call()
    except REFUSALS as error:
        if not same(before, seen()):
            raise ChangedError(f"by a call that raised {error!r}") from error
        return True
    return False


class ChangedError(Exception):
    """What a refused call must not do."""


def same(a: Any, b: Any) -> bool:
    """Equal in types, structure, dtypes and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
            return False
        return a.device.type == "meta" or torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


# -- readers --------------------------------------------------------------------------------------


def _scaler() -> fastamp.GradScaler:
    options = {"min_scale": 1.0, "max_scale": 2.0**20, "hysteresis": 2, "fast_growth_interval": 4}
    scaler = fastamp.GradScaler("cpu", history_size=3, **options)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for gradient in (1.0, math.inf, 1.0, math.inf):
        scaler.scale(parameter.sum()).backward()
        parameter.grad = torch.full((2,), gradient)
        scaler.step(optimizer)
        scaler.update()
    return scaler


def _use(scaler: fastamp.GradScaler) -> None:
    """A loaded state can be used, saved and loaded: as far as torch's can."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    try:
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scaler.load_state_dict(scaler.state_dict())
    except (*REFUSALS, OverflowError):
        pass  # torch takes any number and fails at its use


def read_json(data: bytes) -> bool:
    """A scaler from a text."""
    text = data.decode("utf-8", "surrogateescape")
    scaler = _scaler()
    if refused(lambda: scaler.load_json(text), lambda: snapshot(scaler)):
        return False
    _use(scaler)
    again = fastamp.GradScaler.from_json(text).to_json()
    assert fastamp.GradScaler.from_json(again).to_json() == again
    return True


def read_scaler_state(data: bytes) -> bool:
    """A scaler from its ``state_dict``."""
    scaler = _scaler()
    state = Edits(data).edited(scaler.state_dict())
    if refused(lambda: scaler.load_state_dict(state), lambda: snapshot(scaler)):
        return False
    _use(scaler)
    return True


def read_policies(data: bytes) -> bool:
    """A policy file. What is read is written and read again as the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policies.toml"
        path.write_bytes(data)
        try:
            file = PolicyFile.read(path)
        except ValueError as error:
            if not str(error).startswith(str(path)):
                raise AssertionError("names no file") from error
            return False
        file.write(path)
        assert PolicyFile.read(path) == file
        return True


def read_policy_variable(data: bytes) -> bool:
    """The variable FASTAMP_POLICY."""
    try:
        PolicyFile.of_variable(data.decode("utf-8", "replace"))
    except ValueError as error:
        if "FASTAMP_POLICY" not in str(error):
            raise AssertionError("does not name the variable") from error
        return False
    return True


_KINDS: tuple[Callable[[list[torch.nn.Parameter]], Any], ...] = (
    lambda params: fastamp.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: fastamp.optim.AdamW(params, lr=0.1, amsgrad=True),
    lambda params: fastamp.optim.Adam(params, lr=0.1, state_dtype=torch.bfloat16),
    lambda params: fastamp.optim.AdamW(params, lr=0.1, state_dtype="8bit"),
    lambda params: fastamp.optim.AdamW(params, lr=0.1, state_dtype="8bit", master="float32"),
    lambda params: fastamp.optim.Muon(params[1:], lr=0.1),
)


def read_optimizer_state(data: bytes) -> bool:
    """An optimizer from its ``state_dict``, codes of moments among them; it steps afterwards."""
    edits = Edits(data)
    kind = _KINDS[edits.below(len(_KINDS))]
    params = [
        torch.nn.Parameter(torch.linspace(-1, 1, 70)),
        torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4).bfloat16()),
    ]
    optimizer = kind(params)
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    state = edits.edited(optimizer.state_dict())

    def seen() -> Any:
        return [copy.deepcopy(optimizer.state_dict()), [param.detach().clone() for param in params]]

    if refused(lambda: optimizer.load_state_dict(state), seen):
        return False
    # torch's own step, to which some options lead, raises anything, after it has written some.
    with mock.patch.object(_fused, "step_with_torch"):
        refused(optimizer.step, lambda: [param.detach().clone() for param in params])
    return True


READERS: dict[str, Callable[[bytes], bool]] = {
    "json": read_json,
    "scaler_state": read_scaler_state,
    "policies": read_policies,
    "policy_variable": read_policy_variable,
    "optimizer_state": read_optimizer_state,
}

#: Those that read their bytes as a text.
TEXTS = ("json", "policies", "policy_variable")


def corpus(reader: str) -> list[bytes]:
    """The committed cases of a reader: valid ones, and those that were faults once."""
    return [path.read_bytes() for path in sorted((SEEDS / reader).iterdir())]


def damaged(reader: str, seed: int, count: int) -> Iterator[bytes]:
    """Cases made of the corpus without knowledge of the code."""
    draw = random.Random(f"{reader} {seed}")
    if reader not in TEXTS:
        yield from (draw.randbytes(draw.randint(3, 24)) for _ in range(count))
        return
    cases = corpus(reader)
    words = sorted({word for case in cases for word in case.split()})
    for _ in range(count):
        case = bytearray(draw.choice(cases))
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(case) + 1)
            how = draw.random()
            digits = [i for i, byte in enumerate(case) if byte in b"0123456789"]
            if how < 0.4 and digits:
                case[draw.choice(digits)] = draw.choice(b"0123456789.e-")
            elif how < 0.5:
                case[at : at + draw.randint(1, 8)] = b""
            elif how < 0.6:
                case[at : at + draw.randint(0, 2)] = draw.randbytes(draw.randint(1, 3))
            elif how < 0.8 and words:
                case[at:at] = draw.choice(words)
            else:
                other = draw.choice(cases)
                begin = draw.randrange(len(other) + 1)
                case[at:at] = other[begin : begin + draw.randint(1, 40)]
        yield bytes(case)


__all__ = ["READERS", "corpus", "damaged"]
