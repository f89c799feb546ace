# SPDX-License-Identifier: Apache-2.0
"""Independent references for the scaler's ops, and how tests compare with them."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import pytest
import torch

import fastamp  # noqa: F401  (registers torch.ops.fastamp)

unscale_ = torch.ops.fastamp.unscale_and_check_
update_scale_ = torch.ops.fastamp.update_scale_

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DEVICES = (
    pytest.param("cpu", id="cpu"),
    pytest.param(
        "cuda",
        id="cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
)
BITS = {
    torch.uint8: torch.uint8,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.int16: torch.int16,
}


def unscaled(grad: torch.Tensor, inv_scale: float) -> torch.Tensor:
    """grad * inv_scale as the op defines it, from exact products in float64.

    The product of two fp32 numbers fits float64, so rounding it once gives the fp32 product.
    """
    if inv_scale == 1.0:
        return grad.clone()
    product = grad.double() * inv_scale
    return product if grad.dtype == torch.float64 else product.float().to(grad.dtype)


def fp32(value: float) -> float:
    """Rounds to fp32; beyond its range to inf."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, any NaN being as good as another."""
    assert got.dtype == expected.dtype
    assert torch.equal(got.isnan(), expected.isnan())
    bits = BITS[got.dtype]
    keep = ~expected.isnan()
    # .cpu() first: gathers by mask do not exist for all dtypes everywhere.
    assert torch.equal(
        got.cpu()[keep.cpu()].view(bits), expected.cpu()[keep.cpu()].contiguous().view(bits)
    )


def check_unscale(grads: list[torch.Tensor], inv_scale: float, before: float = 0.0) -> None:
    """Runs the op on copies that keep the strides, and compares gradients and flag."""
    mine = [g.detach().clone(memory_format=torch.preserve_format) for g in grads]
    check_unscale_in_place(mine, grads, inv_scale, before)


def check_unscale_in_place(
    mine: list[torch.Tensor], original: list[torch.Tensor], inv_scale: float, before: float = 0.0
) -> None:
    """The same on tensors that are given, such as views; ``original`` holds their values."""
    inv_scale = fp32(inv_scale)
    device = original[0].device if original else torch.device("cpu")
    original = [g.detach().clone() for g in original]
    found_inf = torch.full((), before, device=device)
    unscale_(mine, torch.tensor(inv_scale, device=device), found_inf)
    written = [unscaled(g, inv_scale) for g in original]  # inf and NaN stay so
    bad = any(not bool(g.isfinite().all()) for g in written)
    assert found_inf.item() == (1.0 if bad else before)
    for got, expected in zip(mine, written, strict=True):
        assert_same_bits(got, expected)


@dataclass
class ScaleRule:
    """The scale rule written down a second time, in Python floats (which are fp64)."""

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 3
    hysteresis: int = 1
    min_scale: float | None = None
    max_scale: float | None = None

    def step(self, scale: float, tracker: int, left: int, flag: float) -> tuple[float, int, int]:
        """Returns the next scale, growth tracker and overflows left before a backoff."""
        if flag == 0:
            left = self.hysteresis
            tracker += 1
            if tracker == self.growth_interval:
                tracker = 0
                grown = fp32(scale * self.growth_factor)
                scale = grown if math.isfinite(grown) else scale
        else:
            tracker = 0
            left = max(left - 1, 0)
            if left == 0:
                scale = fp32(scale * self.backoff_factor)
        if self.min_scale is not None:
            scale = max(scale, fp32(self.min_scale))
        if self.max_scale is not None:
            scale = min(scale, fp32(self.max_scale))
        return scale, tracker, left
