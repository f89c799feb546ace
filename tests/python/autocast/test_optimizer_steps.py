# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps inside a region: later uses see the weights that the step has written."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

import fastamp
import fastamp._C as _C
from support.casts import cast_nodes

BF16 = torch.bfloat16


class WritesData(torch.optim.Optimizer):
    """As many optimizers outside torch are written."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


def fused(cls: type) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: cls(params, lr=0.1, fused=True)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": fused(torch.optim.SGD),
    "Adam": fused(torch.optim.Adam),
    "AdamW": fused(torch.optim.AdamW),
    "Adagrad": fused(torch.optim.Adagrad),
    "AdamW with a tensor for a rate": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(0.1), fused=True
    ),
    "one that writes .data": lambda params: WritesData(params, lr=0.1),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
}
REGIONS: dict[str, Callable[[], Any]] = {
    "fastamp": lambda: fastamp.autocast("cpu", dtype=BF16),
    "torch": lambda: torch.autocast("cpu", dtype=BF16),
    "one without cache": lambda: fastamp.autocast("cpu", dtype=BF16, cache_enabled=False),
}


def losses(
    make: Callable[[Any], torch.optim.Optimizer],
    around: Callable[[], Any],
    inside: Callable[[], Any] = contextlib.nullcontext,
    around_step: Callable[[], Any] = contextlib.nullcontext,
) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = make(model.parameters())
    x = torch.arange(8.0).view(2, 4) / 8
    seen = []
    with around():
        for _ in range(4):
            with inside():
                loss = model(x).float().square().mean()
            seen.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            with around_step():
                optimizer.step()
    return seen


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_within_a_region_trains_as_one_around_regions(optimizer: str, region: str):
    make = OPTIMIZERS[optimizer]
    expected = losses(make, contextlib.nullcontext, REGIONS[region])
    assert len(set(expected)) == 4
    assert losses(make, REGIONS[region]) == expected


def test_a_step_where_autocast_is_off_counts_as_well():
    def off() -> Any:
        return fastamp.autocast("cpu", enabled=False)

    make = OPTIMIZERS["AdamW"]
    expected = losses(make, contextlib.nullcontext, REGIONS["fastamp"])
    assert losses(make, REGIONS["fastamp"], around_step=off) == expected


def test_a_gradient_scaler_steps_in_a_region_too():
    for cls in (torch.amp.GradScaler, fastamp.GradScaler):
        weight = torch.nn.Parameter(torch.ones(2, 2))
        weight.grad = torch.full((2, 2), 4.0)
        scaler = cls("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        with fastamp.autocast("cpu", dtype=BF16):
            torch.mm(weight, weight)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(torch.mm(weight, torch.ones(2, 2)).float(), torch.zeros(2, 2))


def test_only_the_optimizers_own_weights_are_cast_again():
    stepped, other = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    stepped.grad = torch.ones(2, 2)
    optimizer = torch.optim.SGD([stepped], lr=0.5, fused=True)
    with fastamp.autocast("cpu", dtype=BF16):
        before = torch.mm(stepped, other)
        optimizer.step()
        after = torch.mm(stepped, other)
        again = torch.mm(stepped, other)
    assert torch.equal(after.float(), torch.full((2, 2), 1.0))
    assert cast_nodes(stepped, before, after, again) == 2
    assert cast_nodes(other, before, after, again) == 1


def test_many_weights_are_found_after_some_were_forgotten():
    weights = [torch.nn.Parameter(torch.full((1, 1), float(i))) for i in range(200)]
    for weight in weights:
        weight.grad = torch.ones(1, 1)
    one = torch.ones(1, 1, dtype=BF16)
    optimizer = torch.optim.SGD(weights[::2], lr=1.0, fused=True)
    with fastamp.autocast("cpu", dtype=BF16):
        outs = [[torch.mm(weight, one)] for weight in weights]
        for _ in range(2):
            optimizer.step()
            for out, weight in zip(outs, weights, strict=True):
                out += [torch.mm(weight, one), torch.mm(weight, one)]
    for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
        steps = (0, 1, 1, 2, 2) if i % 2 == 0 else (0, 0, 0, 0, 0)
        assert [int(o.item()) for o in out] == [i - step for step in steps]
        assert cast_nodes(weight, *out) == (3 if i % 2 == 0 else 1)


def test_a_step_ends_the_casts_of_its_own_thread_alone():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    with fastamp.autocast("cpu", dtype=BF16):
        before = torch.mm(weight, weight)
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        after = torch.mm(weight, weight)
    assert cast_nodes(weight, before, after) == 1


def test_backward_after_the_step_sees_the_weights_of_before_it():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    x = torch.ones(2, 2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    with fastamp.autocast("cpu", dtype=BF16):
        out = torch.mm(x, weight)
        optimizer.step()
    out.float().sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), 2.0))


def test_unusual_groups_change_nothing():
    class Odd(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([torch.nn.Parameter(torch.ones(1))], {})

        def step(self, closure: Any = None) -> str:  # noqa: ARG002
            self.param_groups = [{"params": [3, None, "x"]}, {"params": ()}]
            return "stepped"

    weight = torch.nn.Parameter(torch.ones(2, 2))
    with fastamp.autocast("cpu", dtype=BF16):
        torch.mm(weight, weight)
        assert Odd().step() == "stepped"


def test_there_is_one_hook_and_it_is_a_c_function():
    before = list(_global_optimizer_post_hooks.values())
    assert before.count(_C.after_optimizer_step) == 1
    assert type(_C.after_optimizer_step) is type(len)
    fastamp.casts.keep(torch.nn.Linear(1, 1)).release()
    fastamp.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, autocast_dtype=BF16)
    assert list(_global_optimizer_post_hooks.values()) == before


def test_the_hook_breaks_no_graph():
    @torch.compile(backend="eager", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        for hook in _global_optimizer_post_hooks.values():
            hook(None, (), {})
        return x + 1

    assert torch.equal(function(torch.ones(1)), torch.full((1,), 2.0))
