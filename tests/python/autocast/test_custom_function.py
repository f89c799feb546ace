# SPDX-License-Identifier: Apache-2.0
"""torch.amp.custom_fwd and custom_bwd see our regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.amp import custom_bwd, custom_fwd

import fastamp
from support.autocast_state import torch_kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Product(torch.autograd.Function):
    """mm that writes down the dtypes of its forward and backward."""

    seen: list[torch.dtype] = []  # noqa: RUF012

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        out = torch.mm(a, b)
        Product.seen.append(out.dtype)
        return out

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        grad_a, grad_b = torch.mm(grad, b.t()), torch.mm(a.t(), grad)
        Product.seen.append(grad_a.dtype)
        return grad_a.to(a.dtype), grad_b.to(b.dtype)


class InFloat32(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=FP32)
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        assert not torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(a)
        return torch.mm(a, a)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (a,) = ctx.saved_tensors
        assert not torch.is_autocast_enabled("cpu")
        return torch.mm(grad, a.t()) + torch.mm(a.t(), grad)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("backward_in", ["outside", "inside", "another dtype"])
def test_backward_runs_in_the_forwards_dtype(dtype: torch.dtype, backward_in: str):
    results = []
    for region in (torch.autocast, fastamp.autocast):
        Product.seen.clear()
        a = torch.arange(16.0).view(4, 4).requires_grad_()
        b = torch.eye(4).requires_grad_()
        other = FP16 if dtype == BF16 else BF16
        with region("cpu", dtype=dtype):
            out = Product.apply(a, b)
            if backward_in == "inside":
                out.float().sum().backward()
        if backward_in == "another dtype":
            with region("cpu", dtype=other):
                out.float().sum().backward()
        if backward_in == "outside":
            out.float().sum().backward()
        assert Product.seen == [dtype, dtype]
        results.append((out.detach(), a.grad, b.grad))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_without_a_region_nothing_is_lowered():
    Product.seen.clear()
    a = torch.ones(4, 4, requires_grad=True)
    Product.apply(a, a).sum().backward()
    assert Product.seen == [FP32, FP32]


def test_cast_inputs_runs_forward_and_backward_without_autocast():
    results = []
    for kernels in (False, True):
        a = torch.arange(16.0).view(4, 4).to(BF16).requires_grad_()
        if kernels:
            with torch_kernels(), torch.autocast("cpu"):
                out = InFloat32.apply(a)
        else:
            with fastamp.autocast("cpu"):
                out = InFloat32.apply(a)
        out.sum().backward()
        assert out.dtype == FP32
        results.append((out.detach(), a.grad))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_region_entered_in_backward_works_on_the_backward_thread():
    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, a: torch.Tensor) -> torch.Tensor:
            return a * 2

        @staticmethod
        def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with fastamp.autocast("cpu", dtype=FP16):
                Product.seen.append(torch.mm(grad, grad).dtype)
            return grad

    Product.seen.clear()
    a = torch.ones(4, 4, requires_grad=True)
    Enter.apply(a).sum().backward()
    assert Product.seen == [FP16]


def test_hooks_run_in_backward_see_the_state_torch_gives_them():
    seen = []
    for region in (torch.autocast, fastamp.autocast):
        a = torch.ones(4, 4, requires_grad=True)
        a.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
        with region("cpu"):
            torch.mm(a, a).sum().backward()
        with region("cpu"):
            out = torch.mm(a, a).sum()
        out.backward()
    assert seen[:2] == seen[2:]
