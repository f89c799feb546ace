# SPDX-License-Identifier: Apache-2.0
"""Steps under torch.compile: left out of the graph, and right."""

from __future__ import annotations

import pytest
import torch

import fastamp
from support.optim_twins import PAIRS, assert_same_parameters, copies, parameters

names = pytest.mark.parametrize("name", PAIRS)


def compiled_against_eager(make, wrap):
    torch.manual_seed(5)
    params = parameters(((4,), (2, 3)))
    others = copies(params)
    compiled, eager = make(params), make(others)
    step = wrap(compiled)
    for i in range(4):
        for p, q in zip(params, others, strict=True):
            p.grad = torch.full_like(p, 1.0 + i)
            q.grad = p.grad.clone()
        step()
        eager.step()
        assert_same_parameters(params, others)


@names
def test_compiled_steps_are_the_eager_ones(name):
    cls = PAIRS[name][0]

    def wrap(optimizer):
        @torch.compile(backend="eager")
        def step():
            optimizer.step()

        return step

    try:
        compiled_against_eager(lambda params: cls(params, lr=0.1), wrap)
        compiled_against_eager(
            lambda params: cls(params, lr=0.1),
            lambda o: torch.compile(o.step, backend="eager"),
        )
    finally:
        torch._dynamo.reset()


@names
@pytest.mark.parametrize("scheduled", [False, True])
def test_compiled_steps_of_fused_torch_optimizers_are_the_eager_ones(name, scheduled):
    """A scheduler made before fuse_ calls torch's step, which dynamo knows and would trace."""
    cls = PAIRS[name][1]

    def make(params):
        optimizer = cls(params, lr=0.1)
        if scheduled:
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return fastamp.optim.fuse_(optimizer)

    def wrap(optimizer):
        @torch.compile(backend="eager")
        def step():
            optimizer.step()

        return step

    try:
        compiled_against_eager(make, wrap)
    finally:
        torch._dynamo.reset()
