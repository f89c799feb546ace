# SPDX-License-Identifier: Apache-2.0
"""Casts per training step of known models: at most torch's, of weights none with weight copies.

torch's profiler counts, for torch.amp and for us alike; our own trace has to agree.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fastamp
from benchmarks.counts import profiled
from support.autocast_state import torch_kernels
from support.counted_models import COUNTED

pytestmark = pytest.mark.usefixtures("nothing_is_kept_afterwards")
BF16 = torch.bfloat16
FIRST_STEPS = 2


def training(name: str, make: Callable[..., torch.optim.Optimizer], autocast: type[torch.autocast]):
    torch.manual_seed(0)
    model, x = COUNTED[name]()
    optimizer = make(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        with autocast("cpu", dtype=BF16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()

    for _ in range(FIRST_STEPS):
        step()
    return step, list(model.parameters())


def counts_of_torch(name: str) -> dict[str, float]:
    with torch_kernels():
        step, weights = training(name, torch.optim.AdamW, torch.autocast)
        return profiled(step, "cpu", weights)


def counts_of_fastamp(name: str, autocast_dtype: torch.dtype | None) -> dict[str, float]:
    def make(parameters, lr):
        return fastamp.optim.AdamW(parameters, lr=lr, autocast_dtype=autocast_dtype)

    step, weights = training(name, make, fastamp.autocast)
    counts = profiled(step, "cpu", weights)
    with fastamp.debug.trace() as t:
        step()
    # The profiler's count goes by memory, the trace's by what our cache was asked for.
    assert counts["weight casts"] == t.totals["weight_casts"]
    return {**counts, "shared": t.totals["activation_hits"]}


@pytest.mark.parametrize("name", COUNTED)
def test_steps_cast_no_more_than_torchs_and_no_weight_with_weight_copies(name: str):
    torchs = counts_of_torch(name)
    plain, copying = counts_of_fastamp(name, None), counts_of_fastamp(name, BF16)
    assert 0 < plain["weight casts"] == torchs["weight casts"]
    assert plain["casts"] == torchs["casts"] - plain["shared"]  # activations cast once
    assert copying["weight casts"] == 0
    assert copying["casts"] == plain["casts"] - plain["weight casts"]


@pytest.mark.parametrize("name", COUNTED)
def test_every_weight_that_a_region_casts_is_counted(name: str):
    """torch casts each weight of a linear or convolution once, biases too."""
    torch.manual_seed(0)
    model, _ = COUNTED[name]()
    layers = [m for m in model.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
    weights = sum(p is not None for layer in layers for p in (layer.weight, layer.bias))
    head = name == "GPT-2"  # a linear of its own, with the embedding's weight
    assert counts_of_torch(name)["weight casts"] == weights + head
