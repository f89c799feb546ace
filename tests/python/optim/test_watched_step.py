# SPDX-License-Identifier: Apache-2.0
"""torch's profiler range and hooks around a step: there if something observes it, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fastamp

KINDS = [fastamp.optim.SGD, fastamp.optim.Adam, fastamp.optim.AdamW]


def make(kind: Any) -> Any:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return kind([parameter], lr=0.5)


def fused(_: Any, lr: float) -> Any:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=lr)
    fastamp.optim.fuse_(optimizer)
    return optimizer


@pytest.mark.parametrize("kind", [*KINDS, fused])
def test_hooks_of_an_optimizer_run_once_and_in_order(kind: Any):
    optimizer = make(kind)
    seen: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("pre")),
        optimizer.register_step_post_hook(lambda *_: seen.append("post")),
    ]
    optimizer.step()
    assert seen == ["pre", "post"]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == ["pre", "post"]


@pytest.mark.parametrize("kind", [*KINDS, fused])
def test_hooks_of_all_optimizers_run(kind: Any):
    optimizer = make(kind)
    seen: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda one, *_: seen.append(one)),
        register_optimizer_step_post_hook(lambda one, *_: seen.append(one)),
    ]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [optimizer, optimizer]
    optimizer.step()
    assert len(seen) == 2


def test_a_pre_hook_may_replace_the_arguments():
    optimizer = make(fastamp.optim.SGD)
    handle = optimizer.register_step_pre_hook(lambda *_: ((optimizer, lambda: 7.0), {}))
    assert optimizer.step() == 7.0
    handle.remove()
    assert optimizer.step() is None


@pytest.mark.parametrize("kind", [*KINDS, fused])
def test_a_profiler_sees_the_step_under_torchs_name(kind: Any):
    optimizer = make(kind)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    name = f"Optimizer.step#{type(optimizer).__name__}.step"
    assert [event.name for event in profile.events()].count(name) == 1


def test_a_step_of_a_subclass_runs_hooks_once():
    class Noisy(fastamp.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    optimizer = make(Noisy)
    seen: list[str] = []
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.step()
    assert seen == ["post"]


def test_nothing_is_wrapped_around_a_step_that_nobody_watches(monkeypatch: Any):
    optimizer = make(fastamp.optim.SGD)

    def refuse(*_: Any) -> None:
        raise AssertionError("a profiler range was opened")

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", refuse)
    optimizer.step()
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(AssertionError, match="range"):
        optimizer.step()


def test_a_scheduler_that_counts_steps_is_content():
    optimizer = make(fastamp.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
