# SPDX-License-Identifier: Apache-2.0
"""bisect finds faults that were not used to make its search."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fastamp

Fault = tuple[nn.Module, Callable[[], torch.Tensor]]


def exponentials_of_large_logits() -> Fault:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50))
    x, target = torch.randn(64, 32), torch.randint(50, (64, 1))

    def loss() -> torch.Tensor:
        logits = model(x) * 40
        return (logits.exp().sum(1).log() - logits.gather(1, target)[:, 0]).mean()

    return model, loss


def division_by_a_count_that_is_inf() -> Fault:
    model, x = nn.Linear(16, 8), torch.randn(70000, 16)

    def loss() -> torch.Tensor:
        y = model(x)
        return (y.float().square().sum(0) / torch.ones_like(y[:, 0]).sum()).sum()

    return model, loss


def cosine_of_short_vectors() -> Fault:
    model, x = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)]), torch.randn(64, 32) * 1e-3

    def loss() -> torch.Tensor:
        a, b = (part(x) * 1e-4 for part in model)
        lengths = (a * a).sum(1).sqrt() * (b * b).sum(1).sqrt()
        return ((a * b).sum(1) / (lengths + 1e-12)).mean()

    return model, loss


def exponential_of_twelve() -> Fault:
    model, x = nn.Linear(16, 16), torch.randn(64, 16)
    return model, lambda: (model(x) + 12).exp().mean().log()


@pytest.mark.parametrize(
    ("fault", "op"),
    [
        (exponentials_of_large_logits, "exp"),
        (division_by_a_count_that_is_inf, "sum"),
        (cosine_of_short_vectors, "aten::mul.Tensor"),
        (exponential_of_twelve, "exp"),
    ],
)
def test_a_held_out_fault_is_found(fault: Callable[[], Fault], op: str):
    torch.manual_seed(0)
    model, loss = fault()

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            value = loss()
        value.float().backward()

    report = fastamp.debug.bisect(step, model)
    assert [row.op for row in report.ops] == [op]
    assert report.before < 0.999 <= report.after
    assert report.runs <= 12


def test_sparse_gradients_are_compared_like_others():
    model = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 2))

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.tensor([1, 1, 3])).float().square().sum()
        loss.backward()

    assert fastamp.debug.bisect(step, model).before > 0.999


def test_a_model_without_sizes_yet_is_refused():
    model = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(ValueError, match=r"bisect: .* got 0\.weight of a lazy module"):
        fastamp.debug.bisect(lambda: model(torch.ones(2, 4)).sum().backward(), model)
