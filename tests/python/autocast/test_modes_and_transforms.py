# SPDX-License-Identifier: Apache-2.0
"""Casts of weights under dispatch modes, in checkpoints and in transforms have torch's bits."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import func
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import fastamp
from fastamp._debug.check import Findings, run_checked
from fastamp._debug.watch.model_names import ModelNames
from fastamp._util.tool_guard import ToolGuard
from support.autocast_state import torch_kernels
from support.casts import cast_nodes

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_logging() -> Iterator[None]:
    """torch's checkpoint logs a line with debug=True that logging cannot format."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


Use = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]


class Passing(TorchDispatchMode):
    """Hands ops on, and counts casts."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.casts += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


def hidden(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Uses the weight four times: gradients of one cast are summed in 16 bits."""
    for _ in range(4):
        x = torch.tanh(torch.mm(x, w))
    return x


def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return hidden(x, w).float().sum()


def under(mode: Callable[[], Any]) -> Use:
    def use(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        with mode():
            return [hidden(x, w)]

    return use


@contextmanager
def checked() -> Iterator[None]:
    with run_checked([], Findings(), [], [], ModelNames(), ToolGuard("check")):
        yield


def selective(*saved: Any) -> Callable[[], Any]:
    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op in saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def checkpointed(**options: Any) -> Use:
    return lambda x, w: [checkpoint(hidden, x, w, use_reentrant=False, **options)]


def from_vjp(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    out, pull = func.vjp(lambda v: hidden(x, v), w)
    return [out, *pull(torch.ones_like(out))]


aten = torch.ops.aten
USES: dict[str, Use] = {
    "nothing": under(nullcontext),
    "a dispatch mode": under(Passing),
    "FlopCounterMode": under(lambda: FlopCounterMode(display=False)),
    "check": under(checked),
    "checkpoint": checkpointed(),
    "checkpoint, debug": checkpointed(debug=True),
    "selective checkpoint": checkpointed(context_fn=selective(aten.mm.default)),
    "selective checkpoint of casts": checkpointed(context_fn=selective(aten._to_copy.default)),
    "grad of the input": lambda x, w: [func.grad(loss)(x, w)],
    "grad of the weight": lambda x, w: [func.grad(loss, 1)(x, w)],
    "grad of both": lambda x, w: list(func.grad(loss, (0, 1))(x, w)),
    "vjp": from_vjp,
    "vmap": lambda x, w: [func.vmap(lambda row: hidden(row[None], w))(x)],
    "vmap of grad": lambda x, w: [
        func.vmap(func.grad(lambda v, row: loss(row[None], v)), (None, 0))(w, x)
    ],
    "jvp": lambda x, w: list(func.jvp(lambda a: hidden(a, w), (x,), (torch.ones_like(x),))),
    "jacrev": lambda x, w: [func.jacrev(lambda v: hidden(x[:2], v).float().sum(0))(w)],
    "hessian": lambda x, w: [func.hessian(lambda v: loss(x[:2], v))(w)],
    "grad under a mode": lambda x, w: [*under(Passing)(x, w), func.grad(loss, 1)(x, w)],
}


def run(use: Use, region: Any, before: bool, after: bool, backward_inside: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 16, generator=generator).requires_grad_()
    w = torch.nn.Parameter(torch.randn(16, 16, generator=generator))

    def train(outs: list[torch.Tensor]) -> None:
        trained = [out.float().sum() for out in outs if out.requires_grad]
        if trained:
            torch.stack(trained).sum().backward()

    outs = []
    with region("cpu", dtype=BF16):
        outs += [hidden(x, w)] if before else []
        outs += use(x, w)
        outs += [hidden(x, w)] if after else []
        if backward_inside:
            train(outs)
    if not backward_inside:
        train(outs)
    return [*outs, x.grad, w.grad]


def outcome(*arguments: Any) -> list[Any] | str:
    try:
        return run(*arguments)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("region", [fastamp.autocast, torch.autocast])
@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward", "backward inside"])
@pytest.mark.parametrize("after", [False, True], ids=["", "used after"])
@pytest.mark.parametrize("before", [False, True], ids=["", "used before"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_torchs_bits(use: Use, before: bool, after: bool, backward_inside: bool, region: Any):
    with torch_kernels():
        expected = outcome(use, torch.autocast, before, after, backward_inside)
    actual = outcome(use, region, before, after, backward_inside)
    if isinstance(expected, str) or isinstance(actual, str):
        assert actual == expected  # torch's selective checkpoints refuse some orders
        return
    assert len(actual) == len(expected)
    for mine, torchs in zip(actual, expected, strict=True):
        assert (mine is None) == (torchs is None)
        if mine is not None:
            assert mine.dtype == torchs.dtype
            assert torch.equal(mine, torchs)


@pytest.mark.parametrize("mode", [Passing, lambda: FlopCounterMode(display=False), checked])
def test_a_weight_used_often_under_a_mode_is_cast_once(mode: Callable[[], Any]):
    w = torch.nn.Parameter(torch.randn(8, 8))
    with fastamp.autocast("cpu", dtype=BF16):
        with mode():
            outs = [torch.mm(torch.ones(2, 8), w) for _ in range(64)]
        outs.append(torch.mm(torch.ones(2, 8), w))
    assert cast_nodes(w, *outs) == 1


@pytest.mark.parametrize("mode", [Passing, checked, nullcontext])
def test_what_is_written_behind_torchs_back_is_seen_no_more_than_without_a_mode(mode: Any):
    w = torch.nn.Parameter(torch.ones(8, 8))
    with fastamp.autocast("cpu", dtype=BF16), mode():
        first = torch.mm(torch.ones(2, 8), w)
        w.data.add_(1)
        assert torch.equal(torch.mm(torch.ones(2, 8), w), first)


def test_tools_see_the_memory_that_is_shared_without_them():
    """A view of a weight, and an activation that several ops read; docs/compatibility.md."""
    x = torch.ones(2, 8, requires_grad=True)  # so that backward keeps what was cast
    for mode in (nullcontext, checked):
        w = torch.nn.Parameter(torch.ones(8, 8))
        with fastamp.autocast("cpu", dtype=BF16), mode():
            first = torch.mm(x, w.t())
            hidden = w * 1
            second = torch.mm(x, hidden)
            w.data.add_(1)
            hidden.data.add_(1)
            assert torch.equal(torch.mm(x, w.t()), first)
            assert torch.equal(torch.mm(x, hidden), second)


@pytest.mark.parametrize("mode", [Passing, checked, nullcontext])
def test_kept_casts_are_used_and_made_under_modes(mode: Any):
    w = torch.nn.Parameter(torch.ones(8, 8))
    with fastamp.casts.keep([w]), mode():
        for _ in range(3):
            with fastamp.autocast("cpu", dtype=BF16):
                out = torch.mm(torch.ones(2, 8), w)
            assert out[0, 0] == 8
            w.data.add_(1)
        assert fastamp.casts.kept() == (1, 128)


@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
def test_a_cast_that_a_mode_replaced_stays_inside_it(kept: bool):
    w = torch.nn.Parameter(torch.randn(8, 8))
    x = torch.ones(2, 8)
    with fastamp.casts.keep([w]) if kept else nullcontext(), fastamp.autocast("cpu", dtype=BF16):
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(torch.mm(x, w), FakeTensor)
        assert not isinstance(torch.mm(x, w), FakeTensor)


def test_a_weight_that_an_ended_transform_has_read_is_cast_once_after_it():
    w = torch.nn.Parameter(torch.randn(8, 8))
    x = torch.randn(2, 8)
    with fastamp.autocast("cpu", dtype=BF16):
        func.grad(lambda a: torch.mm(a, w).sum())(x)
        outs = [torch.mm(x, w), torch.mm(x, w)]
    assert not torch._C._functorch.is_gradtrackingtensor(outs[0])
    assert cast_nodes(w, *outs) == 1


def test_a_cast_that_a_mode_around_a_transform_replaced_stays_inside_it():
    w = torch.nn.Parameter(torch.randn(8, 8))
    x = torch.ones(2, 8)
    with fastamp.autocast("cpu", dtype=BF16):
        with FakeTensorMode(allow_non_fake_inputs=True):
            func.grad(lambda a: torch.mm(a, w).sum())(x)
        assert not isinstance(torch.mm(x, w), FakeTensor)
