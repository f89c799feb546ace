# SPDX-License-Identifier: Apache-2.0
"""Products in fp8 on fake CUDA tensors, which need no GPU: what cuBLAS would be asked to do.

The op's function for fake tensors checks what its CUDA kernel checks, but for the pair of formats.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import fastamp
from support.float8 import E4M3, E5M2, float8_region, outcomes

BF16, FP16 = torch.bfloat16, torch.float16
K, N = 64, 48
EVERY_SIZE = fastamp.float8.Recipe(small_size=(0, 0))

pytestmark = pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")


class Recording(TorchDispatchMode):
    """Keeps the arguments of each product in fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten._scaled_mm.default:
            names = [argument.name for argument in func._schema.arguments]
            self.products.append({**dict(zip(names, args, strict=False)), **kwargs, "out": out})
        return out


@contextlib.contextmanager
def fake_cuda_region(**kwargs: Any) -> Iterator[None]:
    """A region with a recipe on CUDA; without a GPU torch switches it off, and here it is on."""
    with float8_region("cuda", **{"float8": EVERY_SIZE, **kwargs}):
        if fastamp.float8.recipe("cuda") is None:
            torch.set_autocast_enabled("cuda", True)
        if fastamp.float8.recipe("cuda") is None:
            pytest.skip("a GPU without fp8, or a build without the CUDA part")
        yield


def tensor(*sizes: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device="cuda", requires_grad=grad)


def backward(y: torch.Tensor) -> tuple[Any, Any, Any]:
    """What the node of a product computes; the engine needs a GPU to find its streams."""
    found: tuple[Any, Any, Any] = y.grad_fn(torch.empty_like(y))  # type: ignore[misc]
    assert y.grad_fn.name() == "LinearFloat8Backward"  # type: ignore[union-attr]
    return found


Case = tuple[Callable[..., torch.Tensor], tuple[int, int], bool]
CASES: dict[str, Case] = {
    "linear": (lambda x, w, b: functional.linear(x, w, b), (N, K), True),
    "linear without bias": (lambda x, w, _: functional.linear(x, w), (N, K), False),
    "addmm of a transpose": (lambda x, w, b: torch.addmm(b, x, w.t()), (N, K), True),
    "addmm (Conv1D)": (lambda x, w, b: torch.addmm(b, x, w), (K, N), True),
    "mm": (lambda x, w, _: torch.mm(x, w), (K, N), False),
    "mm of a transpose": (lambda x, w, _: torch.mm(x, w.t()), (N, K), False),
    "matmul": (lambda x, w, _: torch.matmul(x, w), (K, N), False),
    "matmul of a transpose": (lambda x, w, _: x @ w.t(), (N, K), False),
}


def check_product(product: dict[str, Any], out_dtype: torch.dtype) -> None:
    a, b, out = product["self"], product["mat2"], product["out"]
    assert a.device.type == b.device.type == out.device.type == "cuda"
    assert {a.dtype, b.dtype} in ({E4M3}, {E4M3, E5M2})
    assert a.stride() == (a.shape[1], 1)
    assert b.stride() == (1, b.shape[0])
    assert a.shape[1] % 16 == b.shape[1] % 16 == 0
    assert a.storage_offset() % 16 == b.storage_offset() % 16 == 0
    for scale in (product["scale_a"], product["scale_b"]):
        assert (scale.dtype, scale.numel(), scale.device.type) == (torch.float32, 1, "cuda")
    assert product["out_dtype"] == out.dtype == out_dtype
    bias = product.get("bias")
    assert bias is None or (bias.dtype == out_dtype != torch.float32)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 197])
def test_products_are_what_cuda_kernels_take(case: str, rows: int):
    function, sizes, has_bias = CASES[case]
    with FakeTensorMode(), Recording() as recorded:
        x, weight, bias = tensor(rows, K), tensor(*sizes), tensor(N)
        with fake_cuda_region():
            y = function(x, weight, bias)
        forward = len(recorded.products)
        gradients = backward(y)
    assert (y.shape, y.dtype, y.device.type) == ((rows, N), BF16, "cuda")
    assert (forward, len(recorded.products)) == (1, 3)
    of_y, *of_gradients = recorded.products
    check_product(of_y, BF16)
    assert (of_y.get("bias") is not None) == has_bias
    assert (of_y["self"].shape, of_y["mat2"].shape) == ((rows, K), (K, N))
    assert {of_y["self"].dtype, of_y["mat2"].dtype} == {E4M3}
    assert of_y.get("use_fast_accum", False)
    for product in of_gradients:
        check_product(product, torch.float32)
        assert product.get("bias") is None
        assert not product.get("use_fast_accum", False)
        assert {product["self"].dtype, product["mat2"].dtype} == {E4M3, E5M2}
    padded = (rows + 15) // 16 * 16
    shapes = [(tuple(p["self"].shape), tuple(p["mat2"].shape)) for p in of_gradients]
    assert ((rows, N), (N, K)) in shapes
    # Conv1D's weight lies as [K, N], and so does its gradient.
    wanted = ((K, padded), (padded, N)) if sizes == (K, N) else ((N, padded), (padded, K))
    assert wanted in shapes
    of_x, of_weight, of_bias = gradients
    assert (of_x.shape, of_x.dtype) == (x.shape, torch.float32)
    # The operand, which may be the transpose of the weight: in the weight's layout either way.
    operand = weight if of_weight.shape == weight.shape else weight.t()
    assert (of_weight.shape, of_weight.stride()) == (operand.shape, operand.stride())
    assert of_weight.dtype == torch.float32
    assert (of_bias is not None) == has_bias
    assert not has_bias or (of_bias.shape, of_bias.dtype) == ((N,), torch.float32)


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("base_dtype", [BF16, FP16])
def test_dtypes_of_results_follow_the_operands(dtype: torch.dtype, base_dtype: torch.dtype):
    recipe = dataclasses.replace(EVERY_SIZE, grad_dtype=E4M3, fast_accumulate=(False, True, True))
    with FakeTensorMode(), Recording() as recorded:
        x, weight, bias = (tensor(*s, dtype=dtype) for s in ((2, 9, K), (N, K), (N,)))
        with fake_cuda_region(dtype=base_dtype, float8=recipe):
            y = functional.linear(x, weight, bias)
        gradients = backward(y)
    assert (y.shape, y.dtype) == ((2, 9, N), base_dtype)
    for gradient, source in zip(gradients, (x, weight, bias), strict=True):
        assert (gradient.shape, gradient.dtype) == (source.shape, dtype)
    for product, out_dtype in zip(recorded.products, (base_dtype, dtype, dtype), strict=True):
        check_product(product, out_dtype)
        assert {product["self"].dtype, product["mat2"].dtype} == {E4M3}
    assert [p.get("use_fast_accum", False) for p in recorded.products] == [False, True, True]


@pytest.mark.parametrize(
    "strided",
    [
        lambda: tensor(K, 1).t(),
        lambda: tensor(1, 1).expand(1, K),
        lambda: tensor(1, 1).expand(17, K),
        lambda: tensor(K, 17).t(),
        lambda: tensor(34, K)[::2],
        lambda: tensor(17, 2 * K)[:, ::2],
        lambda: tensor(17, K + 1)[:, 1:],
        lambda: tensor(3, K, 5).transpose(1, 2),
    ],
)
def test_inputs_may_lie_in_memory_in_any_way(strided: Any):
    with FakeTensorMode(), Recording() as recorded:
        x, weight = strided(), tensor(N, K)
        with fake_cuda_region():
            y = functional.linear(x, weight)
        backward(y)
    for product, out_dtype in zip(recorded.products, (BF16, None, None), strict=True):
        check_product(product, out_dtype or torch.float32)


def test_a_weight_that_lies_column_by_column():
    with FakeTensorMode(), Recording() as recorded:
        weight = tensor(K, N, grad=False).t().requires_grad_()
        x = tensor(17, K)
        with fake_cuda_region():
            y = functional.linear(x, weight)
        backward(y)
    for product, out_dtype in zip(recorded.products, (BF16, None, None), strict=True):
        check_product(product, out_dtype or torch.float32)


@pytest.mark.parametrize(("wants_x", "wants_weight"), [(True, False), (False, True)])
def test_gradients_that_nobody_wants_are_not_computed(wants_x: bool, wants_weight: bool):
    with FakeTensorMode(), Recording() as recorded:
        x, weight = tensor(17, K, grad=wants_x), tensor(N, K, grad=wants_weight)
        with fake_cuda_region():
            y = functional.linear(x, weight)
        of_x, of_weight, _ = backward(y)
    assert len(recorded.products) == 2
    assert [of_x is not None, of_weight is not None] == [wants_x, wants_weight]


def test_ineligible_products_issue_none():
    def calls() -> list[tuple[Callable[[], torch.Tensor], str]]:
        weight = tensor(N, K)
        return [
            (lambda: functional.linear(tensor(16, 40), tensor(N, 40)), "K or N not a multiple"),
            (lambda: functional.linear(tensor(16, K), tensor(50, K)), "K or N not a multiple"),
            (lambda: tensor(16, K) @ (weight * 2).t(), "second operand is no weight"),
            (lambda: tensor(16, K) @ weight[:16].t(), "second operand is no weight"),
            (lambda: tensor(16, K) @ tensor(K, N, grad=False), "second operand is no weight"),
            (lambda: functional.linear(tensor(0, K), weight), "empty"),
            (lambda: torch.addmm(tensor(N), tensor(16, K), weight.t(), alpha=2), "not x times"),
            (lambda: functional.linear(tensor(16, K).double(), weight.double()), "dtype"),
        ]

    with FakeTensorMode(), Recording() as recorded, fake_cuda_region():
        for call, reason in calls():
            (outcome,) = set(outcomes(call)) - {""}
            assert outcome.startswith(reason)
        assert not recorded.products
        assert outcomes(lambda: functional.linear(tensor(16, K), tensor(N, K))) == ["float8"]
        assert len(recorded.products) == 1


def test_on_cuda_a_product_runs_in_fp8_by_default_if_it_is_large():
    with FakeTensorMode(), Recording() as recorded, fake_cuda_region(float8=True):
        small, large = tensor(1024, 4096), tensor(1040, 16)
        for weight, outcome in ((small, "K and N within small_size"), (large, "float8")):
            x = tensor(2, weight.shape[1])
            assert outcomes(lambda x=x, weight=weight: functional.linear(x, weight)) == [outcome]
        assert len(recorded.products) == 1


def test_fake_tensors_on_the_cpu_run_in_fp8_and_leave_nothing_behind():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    with float8_region():
        expected = layer(x)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, Recording() as recorded:
            y = layer(mode.from_tensor(x))
        assert len(recorded.products) == 1
        assert (y.shape, y.dtype) == ((4, 16), BF16)
        assert torch.equal(layer(x), expected)
