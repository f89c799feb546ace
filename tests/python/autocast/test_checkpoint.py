# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing recomputes in the dtypes of the first run."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fastamp
from support.autocast_state import TORCH_LOSES_GRADIENTS, torch_kernels

BF16, FP16 = torch.bfloat16, torch.float16


class Spy(nn.Module):
    """A linear layer that writes down the dtype of each of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        self.seen.append(out.dtype)
        return out.relu()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Spy() for _ in range(3)))


def run(
    region: Any, dtype: torch.dtype, reentrant: bool | None, inside: bool
) -> list[torch.Tensor]:
    layers = model()
    x = torch.ones(4, 8, requires_grad=True)
    with region("cpu", dtype=dtype):
        hidden = x
        for layer in layers:
            if reentrant is None:
                hidden = layer(hidden)
            else:
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
        loss = hidden.sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    for layer in layers:
        assert layer.seen == [dtype] * (1 if reentrant is None else 2)
    return [loss.detach(), x.grad, *(p.grad for p in layers.parameters())]


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_recomputation_keeps_dtypes_and_bits(reentrant: bool, dtype: torch.dtype, inside: bool):
    plain = run(fastamp.autocast, dtype, None, inside)
    own = run(fastamp.autocast, dtype, reentrant, inside)
    with torch_kernels():
        torchs = run(torch.autocast, dtype, reentrant, inside)
    if TORCH_LOSES_GRADIENTS and reentrant and inside:
        # The reentrant one's forward pass runs without grad mode.
        assert all(gradient is None for gradient in torchs[2:])
        torchs = plain
    for a, b, c in zip(own, torchs, plain, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_under_a_region_of_another_dtype_recomputes_in_the_first(reentrant: bool):
    layer = model()[0]
    x = torch.ones(4, 8, requires_grad=True)
    with fastamp.autocast("cpu", dtype=FP16):
        out = checkpoint(layer, x, use_reentrant=reentrant)
    with fastamp.autocast("cpu", dtype=BF16):
        out.sum().backward()
    assert layer.seen == [FP16, FP16]


@pytest.mark.parametrize("reentrant", [True, False])
def test_region_inside_the_checkpointed_function(reentrant: bool):
    layer = model()[0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        with fastamp.autocast("cpu", dtype=FP16):
            return layer(x)

    x = torch.ones(4, 8, requires_grad=True)
    checkpoint(forward, x, use_reentrant=reentrant).sum().backward()
    assert layer.seen == [FP16, FP16]


def test_checkpoint_sequential_and_disabled_inner_region():
    layers = model()
    x = torch.ones(4, 8, requires_grad=True)
    with fastamp.autocast("cpu"), fastamp.autocast("cpu", enabled=False):
        checkpoint_sequential(layers, 3, x, use_reentrant=False).sum().backward()
    assert {dtype for layer in layers for dtype in layer.seen} == {torch.float32}


def test_weight_edited_between_forward_and_recomputation_is_used_as_it_is_then():
    layer = model()[0]
    x = torch.ones(4, 8, requires_grad=True)
    with fastamp.autocast("cpu"):
        out = checkpoint(layer, x, use_reentrant=False)
        with torch.no_grad():
            layer.linear.weight.zero_()
        out.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def save_products(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    save = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_selective_checkpointing_gives_torchs_bits(dtype: torch.dtype):
    results = []
    for kernels in (torch_kernels(), nullcontext()):
        with kernels:
            layers = model()
            x = torch.ones(4, 8, requires_grad=True)
            with fastamp.autocast("cpu", dtype=dtype):
                context_fn = partial(create_selective_checkpoint_contexts, save_products)
                hidden = layers(x)
                for _ in range(2):
                    hidden = checkpoint(layers, hidden, use_reentrant=False, context_fn=context_fn)
                hidden.sum().backward()
            results.append([hidden.detach(), x.grad, *(p.grad for p in layers.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
