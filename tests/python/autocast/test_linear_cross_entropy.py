# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.linear_cross_entropy in regions: torch 2.13 and later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import fastamp
from support.autocast_state import torch_kernels

fused: Any = getattr(functional, "linear_cross_entropy", None)
pytestmark = pytest.mark.skipif(
    fused is None, reason="F.linear_cross_entropy is from torch 2.13 on"
)
BF16 = torch.bfloat16


def run(loss_of: Any, region: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 32, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(40, 32, generator=generator).requires_grad_()
    target = torch.randint(0, 40, (16,), generator=generator)
    with region("cpu", dtype=BF16):
        loss = loss_of(x, head, target)
    loss.backward()
    return [loss.detach(), x.grad, head.grad]


def chunked(x: torch.Tensor, head: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return fused(x, head, target, options=torch.nn.LinearCrossEntropyOptions())


def two_ops(x: torch.Tensor, head: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(x, head), target)


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_without_options_it_is_two_ops_with_their_policies(dtype: torch.dtype):
    found = run(fused, fastamp.autocast, dtype)
    assert same(found, run(two_ops, fastamp.autocast, dtype))
    with torch_kernels():
        assert same(found, run(fused, torch.autocast, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_with_options_it_is_torchs_by_default(dtype: torch.dtype):
    found = run(chunked, fastamp.autocast, dtype)
    with torch_kernels():
        assert same(found, run(chunked, torch.autocast, dtype))
