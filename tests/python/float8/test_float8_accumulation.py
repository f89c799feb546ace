# SPDX-License-Identifier: Apache-2.0
"""Gradients of fp8 products: made in the dtype in which they are kept, and added in one pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastamp

RECIPE = fastamp.float8.Recipe(small_size=(0, 0))
SIZES = (32, 48)


class Seen(TorchDispatchMode):
    """Notes the ops that read or return a tensor of one of these sizes."""

    def __init__(self, *sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = sizes
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        if any(t.dtype.itemsize > 1 and tuple(t.shape) in self.sizes for t in tensors):
            self.ops.append(func.__name__)
        return result


def layer(low: bool) -> nn.Linear:
    """One with weights that bfloat16 holds, which are in bfloat16 or in float32."""
    torch.manual_seed(0)
    made = nn.Linear(SIZES[1], SIZES[0])
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.bfloat16())
    if low:
        fastamp.optim.low_precision_weights_(made, verbose=False)
    return made


def backward(made: nn.Linear, seed: int, *modes: TorchDispatchMode) -> None:
    x = torch.randn(16, SIZES[1], generator=torch.Generator().manual_seed(seed))
    with fastamp.autocast("cpu", dtype=torch.bfloat16, float8=RECIPE):
        loss = made(x).float().square().mean()
    if not modes:
        loss.backward()
    for mode in modes:
        with mode:
            loss.backward()


@pytest.mark.parametrize("low", [False, True], ids=["float32 weights", "bfloat16 weights"])
def test_a_second_micro_batch_adds_its_gradient_in_one_pass(low):
    made = layer(low)
    backward(made, 0)
    seen = Seen(SIZES)
    backward(made, 1, seen)
    assert made.weight.dtype == (torch.bfloat16 if low else torch.float32)
    assert made.weight.grad.dtype == torch.float32
    assert seen.ops == ["_scaled_mm.default", "add_.Tensor"]


def test_16_bit_weights_get_the_gradients_of_float32_ones():
    low, wide = layer(low=True), layer(low=False)
    for seed in range(3):
        backward(low, seed)
        backward(wide, seed)
        for a, b in zip(low.parameters(), wide.parameters(), strict=True):
            assert a.dtype == torch.bfloat16
            assert a.grad.dtype == torch.float32
            assert torch.equal(a.grad, b.grad)


def test_a_gradient_is_made_in_the_dtype_that_its_weight_asks_for():
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch without Tensor.grad_dtype")
    made = layer(low=False).bfloat16()
    for parameter in made.parameters():
        parameter.grad_dtype = torch.float32
    wide = layer(low=False)
    for seed in range(2):
        backward(made, seed)
        backward(wide, seed)
    for a, b in zip(made.parameters(), wide.parameters(), strict=True):
        assert a.grad.dtype == torch.float32
        assert torch.equal(a.grad, b.grad)
