# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at every line of fastamp's Python code, and hooks that raise.

What a call leaves behind is what was there before, or what it leaves behind when nothing
interrupts it. Regions have no such lines: they are entered and left in C++.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fastamp
from nets.files import same

SOURCES = str(Path(fastamp.__file__).parent)

#: Makes a subject: a call, and what can be seen of it.
Make = Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]


class _Interrupt:
    """Raises KeyboardInterrupt before the n-th line that fastamp runs."""

    def __init__(self, before: int) -> None:
        self.left = before
        self.at = ""

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line" and not self.at:
            if self.left == 0:
                self.at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
            self.left -= 1
        return self._line

    def _call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(SOURCES) else None

    def __enter__(self) -> _Interrupt:
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)


def interrupt_everywhere(make: Make) -> int:
    """Interrupts a call at each of its lines in turn; returns how many there are."""
    for _ in range(2):  # What is made once in a process.
        call, seen = make()
        call()
    after = seen()
    count = 0
    while True:
        call, seen = make()
        before = seen()
        with _Interrupt(count) as interrupt, contextlib.suppress(KeyboardInterrupt):
            call()
        found = seen()
        assert same(found, after) or (interrupt.at and same(found, before)), interrupt.at
        if not interrupt.at:
            return count
        count += 1


def _training(optimizer: Callable[[list[Any]], Any], **options: Any) -> tuple[Any, Any, Any]:
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    made = optimizer(params)
    scaler = fastamp.GradScaler("cpu", init_scale=8.0, growth_interval=1, **options)
    scaler.scale(sum(param.sum() for param in params)).backward()
    return params, made, scaler


def _stage(scaler: Any, optimizer: Any) -> str:
    return str(scaler._stage_of(optimizer))


def test_gradients_are_unscaled_if_the_scaler_says_so():
    def make() -> Any:
        params, optimizer, scaler = _training(lambda p: torch.optim.SGD(p, lr=0.1))
        return (
            lambda: scaler.unscale_(optimizer),
            lambda: [_stage(scaler, optimizer), [p.grad.clone() for p in params]],
        )

    assert interrupt_everywhere(make) > 5


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_state_is_loaded_or_not(kind: Any):
    mine = {torch.optim.SGD: fastamp.optim.SGD, torch.optim.AdamW: fastamp.optim.AdamW}[kind]

    def make() -> Any:
        _, source, scaler = _training(lambda p: mine(p, lr=0.3))
        scaler.step(source)
        state = source.state_dict()
        _, optimizer, _ = _training(lambda p: mine(p, lr=0.1))
        return (
            lambda: optimizer.load_state_dict(state),
            lambda: copy.deepcopy(optimizer.state_dict()),
        )

    assert interrupt_everywhere(make) > 5


class HookError(Exception):
    pass


def _raise(*_: Any) -> None:
    raise HookError


@pytest.mark.parametrize("place", ["pre", "post"])
def test_a_hook_that_raises_at_loading_leaves_the_old_state(place: str):
    _, source, scaler = _training(lambda p: fastamp.optim.AdamW(p, lr=0.3))
    scaler.step(source)
    _, optimizer, _ = _training(lambda p: fastamp.optim.AdamW(p, lr=0.1))
    before = copy.deepcopy(optimizer.state_dict())
    getattr(optimizer, f"register_load_state_dict_{place}_hook")(_raise)
    with pytest.raises(HookError):
        optimizer.load_state_dict(source.state_dict())
    assert same(before, optimizer.state_dict())


def test_a_hook_that_raises_when_a_step_is_skipped_leaves_the_scale_moved_once():
    params, optimizer, scaler = _training(lambda p: torch.optim.SGD(p, lr=0.1), on_skip=_raise)
    params[0].grad[0] = math.inf
    scaler.step(optimizer)
    with pytest.raises(HookError):
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert params[0].tolist() == [1.0, 1.0, 1.0]
    scaler.scale(params[0].sum()).backward()
    params[0].grad = torch.full((3,), 4.0)
    scaler.step(optimizer)
    scaler.update()
    assert params[0].tolist() == [pytest.approx(0.9)] * 3
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("mine", [False, True])
def test_a_hook_of_a_step_that_raises_leaves_the_iteration_whole(place: str, mine: bool):
    kind = fastamp.optim.SGD if mine else torch.optim.SGD
    params, optimizer, scaler = _training(lambda p: kind(p, lr=0.1))
    handle = getattr(optimizer, f"register_step_{place}_hook")(_raise)
    with pytest.raises(HookError):
        scaler.step(optimizer)
    handle.remove()
    stepped = params[0].tolist() == [pytest.approx(0.9)] * 3
    assert stepped == (place == "post")
    if not stepped:
        assert params[0].tolist() == [1.0, 1.0, 1.0]
        scaler.step(optimizer)
        assert params[0].tolist() == [pytest.approx(0.9)] * 3
    scaler.update()
    assert scaler.get_scale() == 16.0
