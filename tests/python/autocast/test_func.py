# SPDX-License-Identifier: Apache-2.0
"""torch.func transforms, forward-mode AD and double backward in regions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd_ad
from torch import func

import fastamp
from support.autocast_state import torch_kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def data(seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (4, 4), generator=torch.Generator().manual_seed(seed))


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.mm(x, w).relu()
    return torch.nn.functional.mse_loss(torch.nn.functional.linear(hidden, w), x)


def row_loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(torch.matmul(w, x), x)


def jvp_by_hand(w: torch.Tensor, x: torch.Tensor) -> Any:
    with fwd_ad.dual_level():
        out = torch.mm(x, fwd_ad.make_dual(w, torch.ones_like(w)))
        primal, tangent = fwd_ad.unpack_dual(out)
        assert tangent is not None
        return primal.detach(), tangent.detach()


def jvp_of_a_cached_weight(w: torch.Tensor, x: torch.Tensor) -> Any:
    weight = w.clone().requires_grad_()
    torch.mm(x, weight)
    return jvp_by_hand(weight, x)


def double_backward(w: torch.Tensor, x: torch.Tensor) -> Any:
    weight = w.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(weight, x), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    return first.detach(), second


def functional_call(w: torch.Tensor, x: torch.Tensor) -> Any:
    model = torch.nn.Linear(4, 4, bias=False)
    return func.grad(lambda p: func.functional_call(model, p, (x,)).float().sum())({"weight": w})[
        "weight"
    ]


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "grad": lambda w, x: func.grad(loss)(w, x),
    "grad_and_value": lambda w, x: func.grad_and_value(loss)(w, x),
    "vmap": lambda w, x: func.vmap(torch.matmul, in_dims=(None, 0))(w, x),
    "vmap of grad": lambda w, x: func.vmap(func.grad(row_loss), in_dims=(None, 0))(w, x),
    "jvp": lambda w, x: func.jvp(lambda v: loss(v, x), (w,), (torch.ones_like(w),)),
    "vjp": lambda w, x: func.vjp(lambda v: loss(v, x), w)[1](torch.tensor(1.0)),
    "jacrev": lambda w, x: func.jacrev(lambda v: torch.mm(x, v))(w),
    "jacfwd": lambda w, x: func.jacfwd(lambda v: torch.mm(x, v))(w),
    "hessian": lambda w, x: func.hessian(lambda v: row_loss(v, x[0]))(w),
    "functionalize": lambda w, x: func.functionalize(loss)(w, x),
    "forward mode": jvp_by_hand,
    "forward mode on a cached weight": jvp_of_a_cached_weight,
    "double backward": double_backward,
    "functional_call": functional_call,
}


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    return [leaf for item in value for leaf in flat(item)]


def outcome(name: str, dtype: torch.dtype, parameter: bool) -> Any:
    w: torch.Tensor = torch.nn.Parameter(data(1)) if parameter else data(1)
    try:
        with fastamp.autocast("cpu", dtype=dtype):
            return flat(CALLS[name](w, data(2)))
    except (RuntimeError, NotImplementedError) as error:
        return type(error)


@pytest.mark.parametrize("parameter", [False, True], ids=["tensor", "parameter"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", CALLS)
def test_transform_gives_torchs_bits(name: str, dtype: torch.dtype, parameter: bool):
    results = []
    for kernels in (torch_kernels(), nullcontext()):
        with kernels:
            results.append(outcome(name, dtype, parameter))
    expected, got = results
    if isinstance(expected, type):
        assert got is expected
        return
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_transforms_above_do_run():
    failing = [name for name in CALLS if isinstance(outcome(name, BF16, False), type)]
    assert failing == []


def test_tangent_of_a_lowered_product_is_the_product_of_the_lowered_tangent():
    w, x = data(1), data(2)
    with fastamp.autocast("cpu", dtype=BF16):
        primal, tangent = jvp_by_hand(w, x)
    assert tangent.dtype == primal.dtype == BF16
    assert torch.equal(tangent, torch.mm(x.to(BF16), torch.ones(4, 4, dtype=BF16)))


def test_region_inside_the_transformed_function():
    def inside(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with fastamp.autocast("cpu", dtype=FP16):
            return loss(w, x)

    w, x = data(1), data(2)
    with fastamp.autocast("cpu", dtype=FP16):
        around = func.grad(loss)(w, x)
    assert torch.equal(func.grad(inside)(w, x), around)


def test_conjugate_negative_and_transposed_views_are_cast_by_value():
    x = data(2)
    negative = torch.imag(torch.complex(x, x).conj())
    assert negative.is_neg()
    with fastamp.autocast("cpu"):
        assert torch.equal(torch.mm(negative, x), torch.mm((-x).to(BF16), x.to(BF16)))
        assert torch.equal(torch.mm(x.t(), x), torch.mm(x.t().to(BF16), x.to(BF16)))
        assert torch.equal(
            torch.mm(x[::2, ::2], x[1::2, :2]), torch.mm(x[::2, ::2].to(BF16), x[1::2, :2].to(BF16))
        )


def test_a_weight_that_functionalize_has_seen_keeps_its_gradients():
    """torch 2.11 caches the wrapper that it makes of the cast: later uses have no gradient."""
    w, x = data(1).requires_grad_(), data(2)
    with fastamp.autocast("cpu", dtype=BF16):
        func.functionalize(lambda t: torch.mm(t, w))(x)
        later = torch.mm(x, w)
    later.float().sum().backward()
    expected = torch.mm(x.to(BF16).t(), torch.ones(4, 4, dtype=BF16)).float()
    assert w.grad is not None
    assert torch.equal(w.grad, expected)
