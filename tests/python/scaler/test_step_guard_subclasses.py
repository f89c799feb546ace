# SPDX-License-Identifier: Apache-2.0
"""StepGuard with gradients that are tensor subclasses, which only Python can check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import fastamp


def two(value: float) -> Any:
    return TwoTensor(torch.full((3,), value), torch.full((3,), value))


def test_a_clip_that_hides_an_inf_of_a_subclass_does_not_hide_the_overflow():
    weight = torch.nn.Parameter(two(1.0))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    guard = fastamp.StepGuard(optimizer)
    weight.grad = two(float("inf"))
    guard.clip_grad_value_(1.0)
    optimizer.step()
    assert guard.step_was_skipped
    assert torch.equal(weight.a, torch.ones(3))


def replace(weight: Any) -> Any:
    kept_alive, weight.grad = weight.grad, two(1.0)
    return kept_alive


def replace_by_one_that_was_written_as_often(weight: Any) -> Any:
    kept_alive = replace(weight)
    while weight.grad._version < kept_alive._version:
        weight.grad.mul_(1.0)
    assert weight.grad._version == kept_alive._version
    return kept_alive


def write(weight: Any) -> None:
    weight.grad.copy_(two(1.0))


@pytest.mark.parametrize("give_up", [replace, replace_by_one_that_was_written_as_often, write])
def test_an_overflow_of_gradients_that_were_given_up_is_not_that_of_the_next_ones(give_up: Any):
    weight = torch.nn.Parameter(two(1.0))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    guard = fastamp.StepGuard(optimizer)
    weight.grad = two(float("inf"))
    guard.clip_grad_value_(1.0)
    kept_alive = give_up(weight)
    guard.clip_grad_value_(0.5)
    optimizer.step()
    assert not guard.step_was_skipped
    assert torch.equal(weight.a, torch.full((3,), 0.5))
    del kept_alive


def test_clips_of_subclasses_follow_each_other_as_without_a_guard():
    def stepped(guarded: bool) -> list[Any]:
        weights = [torch.nn.Parameter(two(1.0)), torch.nn.Parameter(torch.ones(3))]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        weights[0].grad, weights[1].grad = two(3.0), torch.full((3,), 4.0)
        guard = fastamp.StepGuard(optimizer) if guarded else None
        for kind, bound in (("norm", 2.0), ("value", 0.9), ("norm", 1.0)):
            if guard is not None:
                getattr(guard, f"clip_grad_{kind}_")(bound)
            else:
                getattr(torch.nn.utils, f"clip_grad_{kind}_")(weights, bound)
        optimizer.step()
        return [weights[0].a, weights[0].b, weights[1]]

    assert all(map(torch.equal, stepped(True), stepped(False)))
