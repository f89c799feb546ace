# SPDX-License-Identifier: Apache-2.0
"""Products in fp8: values and gradients, bit for bit, on the CPU's reference."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fastamp
import fastamp._C as _C
from support.float8 import E4M3, E5M2, dequantized, float8_region, outcomes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def expected_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, base_dtype: torch.dtype
) -> torch.Tensor:
    """The fp32 product of what the fp8 operands stand for, rounded once."""
    left, right = dequantized(x.reshape(-1, x.shape[-1])), dequantized(weight)
    if bias is None:
        out = left @ right.t()
    else:
        out = torch.addmm(bias.detach().to(base_dtype).float(), left, right.t())
    return out.to(base_dtype).reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("base_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_the_dequantized_product_bit_for_bit(
    base_dtype: torch.dtype, x_dtype: torch.dtype, weight_dtype: torch.dtype, with_bias: bool
):
    weight = torch.randn(48, 64).to(weight_dtype).requires_grad_()
    bias = torch.randn(48).to(weight_dtype).requires_grad_() if with_bias else None
    for sizes in [(1, 64), (15, 64), (17, 64), (197, 64), (64,), (2, 3, 64)]:
        x = torch.randn(sizes).to(x_dtype)
        with float8_region(dtype=base_dtype):
            y = functional.linear(x, weight, bias)
        assert y.dtype == base_dtype
        assert torch.equal(y, expected_product(x, weight, bias, base_dtype))


@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16, 17])
def test_gradients_equal_the_dequantized_products_bit_for_bit(
    grad_dtype: torch.dtype, dtype: torch.dtype, rows: int
):
    layer = nn.Linear(64, 48).to(dtype)
    x = torch.randn(rows, 64).to(dtype).requires_grad_()
    with float8_region(float8=fastamp.float8.Recipe(grad_dtype=grad_dtype)):
        y = layer(x)
    grad = (torch.randn(y.shape) * torch.randn(y.shape).exp()).to(y.dtype)
    y.backward(grad)
    of_grad = dequantized(grad, grad_dtype)
    assert torch.equal(x.grad, (of_grad @ dequantized(layer.weight)).to(dtype))
    padded = (rows + 15) // 16 * 16 - rows
    of_x = functional.pad(dequantized(x), (0, 0, 0, padded))
    of_grad = functional.pad(of_grad, (0, 0, 0, padded))
    assert torch.equal(layer.weight.grad, (of_grad.t() @ of_x).to(dtype))
    assert layer.bias.grad.dtype == dtype
    torch.testing.assert_close(
        layer.bias.grad.double(),
        grad.double().sum(0),
        rtol=1e-2 if dtype != DTYPES[0] else 1e-6,
        atol=1e-5,
    )


def test_gradients_of_addmm_mm_and_matmul_are_those_of_linear():
    x = torch.randn(5, 32)
    weight, bias = torch.randn(16, 32), torch.randn(16)
    grad = torch.randn(5, 16).bfloat16()

    def gradients(function: Any, transposed: bool) -> list[torch.Tensor]:
        leaves = [
            tensor.clone().requires_grad_()
            for tensor in (x, weight.t().contiguous() if transposed else weight, bias)
        ]
        with float8_region():
            function(*leaves).backward(grad)
        assert leaves[1].grad.is_contiguous()
        found = [leaves[0].grad, leaves[1].grad.t() if transposed else leaves[1].grad]
        return found if leaves[2].grad is None else [*found, leaves[2].grad]

    expected = gradients(functional.linear, False)
    for function, transposed in [
        (lambda x, w, b: torch.addmm(b, x, w), True),
        (lambda x, w, b: torch.addmm(b, x, w.t()), False),
        (lambda x, w, _: x @ w, True),
        (lambda x, w, _: x @ w.t(), False),
        (lambda x, w, _: torch.mm(x, w), True),
        (lambda x, w, _: torch.mm(x, w.t()), False),
    ]:
        assert outcomes(lambda f=function, t=transposed: gradients(f, t)) == ["float8"]
        for found, wanted in zip(gradients(function, transposed), expected, strict=False):
            assert torch.equal(found, wanted)


def test_a_power_of_two_in_an_operand_comes_out_in_the_product():
    layer, x = nn.Linear(32, 48, bias=False), torch.randn(9, 32)
    with float8_region():
        y = layer(x)
    for factor in (2.0**-9, 0.5, 2.0**17):
        with float8_region():
            assert torch.equal(layer(x * factor), y * factor)


def test_rows_may_be_permuted_and_batches_of_equal_amax_concatenated():
    layer, x = nn.Linear(32, 48), torch.randn(40, 32)
    order = torch.randperm(40)
    with float8_region():
        y = layer(x)
        assert torch.equal(layer(x[order]), y[order])
        assert torch.equal(layer(torch.cat([x, -x])), torch.cat([y, layer(-x)]))


def test_inf_and_nan_hurt_their_row_alone():
    layer, x = nn.Linear(32, 48), torch.randn(9, 32)
    x[3] = 0.1
    with float8_region():
        clean = layer(x)
        x[3, 5] = float("inf")
        hurt = layer(x)
    others = torch.arange(9) != 3
    assert torch.equal(hurt[others], clean[others])
    assert not hurt[3].isfinite().any()


def test_zeros_give_zeros_and_zero_gradients():
    layer, x = nn.Linear(32, 48), torch.zeros(9, 32, requires_grad=True)
    with float8_region():
        y = layer(x)
    assert torch.equal(y, layer.bias.bfloat16().expand(9, 48))
    y.backward(torch.zeros_like(y))
    assert not x.grad.any()
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("sizes", [(0, 32), (4, 0)])
def test_empty_products_are_torchs(sizes: tuple[int, int]):
    x = torch.zeros(sizes, requires_grad=True)
    weight = torch.zeros(16, sizes[1], requires_grad=True)
    with float8_region():
        y = functional.linear(x, weight)
        assert outcomes(lambda: functional.linear(x, weight)) == ["empty"]
    y.sum().backward()
    assert y.shape == (sizes[0], 16)
    assert x.grad.shape == x.shape


def base_dtype_bits(function: Any) -> None:
    """The call gives the bits of a region without a recipe."""
    with fastamp.autocast("cpu", dtype=torch.bfloat16):
        expected = function()
    with float8_region():
        assert torch.equal(function(), expected)


@pytest.mark.parametrize(("k", "n"), [(32, 24), (24, 32), (17, 16)])
def test_k_or_n_not_a_multiple_of_16_stays_in_the_base_dtype(k: int, n: int):
    layer, x = nn.Linear(k, n), torch.randn(16, k)
    base_dtype_bits(lambda: layer(x))
    with float8_region():
        assert outcomes(lambda: layer(x)) == ["K or N not a multiple of 16"]


def test_what_is_no_product_with_a_weight_stays_in_the_base_dtype():
    x, other = torch.randn(16, 32), torch.randn(32, 16)
    weight = torch.randn(32, 16, requires_grad=True)
    for function, reason in [
        (lambda: x @ other, "second operand is no weight"),
        (lambda: x @ (weight * 2), "second operand is no weight"),
        (lambda: x[:, :16] @ weight[:16], "second operand is no weight"),
        (lambda: torch.addmm(other[:1], x, weight), "not x times a weight"),
        (lambda: torch.addmm(other[0], x, weight, alpha=2), "not x times a weight"),
        (lambda: torch.addmm(other[0], x, weight, beta=0), "not x times a weight"),
        (lambda: weight @ x.detach(), "second operand is no weight"),
    ]:
        base_dtype_bits(function)
        with float8_region():
            assert outcomes(function) == [reason]


def test_float64_and_integers_are_left_alone():
    x, weight = torch.randn(16, 32).double(), torch.randn(16, 32).double().requires_grad_()
    base_dtype_bits(lambda: functional.linear(x, weight))
    with float8_region():
        assert functional.linear(x, weight).dtype == torch.float64


def test_functorch_stays_in_the_base_dtype():
    weight, x = torch.randn(16, 32), torch.randn(3, 4, 32)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(x[0], weight).float().sum()

    for function in (
        lambda: torch.func.grad(loss)(weight),
        lambda: torch.func.vmap(lambda row: functional.linear(row, weight))(x),
        lambda: torch.func.jvp(loss, (weight,), (weight,))[1],
    ):
        base_dtype_bits(function)


def test_modes_see_the_ops_and_change_no_bit():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    layer, x = nn.Linear(32, 48), torch.randn(21, 32, requires_grad=True)
    grad = (torch.randn(21, 48) * torch.randn(21, 48).exp()).bfloat16()

    def results(mode: Any) -> list[torch.Tensor]:
        with float8_region(), mode:
            y = layer(x)
            return [y, *torch.autograd.grad(y, [x, *layer.parameters()], grad)]

    expected = results(contextlib.nullcontext())
    for found, wanted in zip(results(Watching()), expected, strict=True):
        assert torch.equal(found, wanted)
    assert seen.count("aten._scaled_mm.default") == 3
    assert all(name.startswith("aten.") for name in seen)
    with float8_region(), Watching():
        assert outcomes(lambda: layer(x)) == ["float8"]


def test_exotic_tensors_stay_in_the_base_dtype():
    from torch.testing._internal.two_tensor import TwoTensor

    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    two = TwoTensor(x, x.clone())
    base_dtype_bits(lambda: layer(two).a)
    with float8_region():
        assert outcomes(lambda: layer(two)) == ["tensor kind, mode or transform"]
        meta = functional.linear(x.to("meta"), layer.weight.to("meta"))
        assert meta.shape == (4, 16)
        assert outcomes(lambda: torch.mm(x.to_sparse(), layer.weight.t())) != ["float8"]


def test_wrong_shapes_raise_torchs_error():
    layer = nn.Linear(32, 16)
    with float8_region(), pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        layer(torch.randn(4, 16))


def test_ops_of_the_recipe_and_policies_decide():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32)
    with float8_region(float8=fastamp.float8.Recipe(ops=("mm",))):
        assert outcomes(lambda: layer(x)) == ["op not in recipe"]
        assert outcomes(lambda: x @ layer.weight.t()) == ["op not in recipe"]
        assert outcomes(lambda: torch.mm(x, layer.weight.t())) == ["float8"]
    with float8_region(), fastamp.policies.override({"linear": "fp32"}):
        assert layer(x).dtype == torch.float32
        assert outcomes(lambda: layer(x)) == [""]


def test_excluded_weights_stay_in_the_base_dtype_until_they_are_released():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    x = torch.randn(4, 32)
    exclusion = fastamp.float8.exclude(model[1])
    with float8_region():
        assert outcomes(lambda: model(x)) == ["excluded", "float8"]
        base_dtype_bits(lambda: model[1](x))
        exclusion.release()
        exclusion.release()
        assert outcomes(lambda: model(x)) == ["float8"]
        with fastamp.float8.exclude(model[0].weight):
            assert outcomes(lambda: model(x)) == ["excluded", "float8"]
        assert outcomes(lambda: model(x)) == ["float8"]
    with pytest.raises(TypeError, match=r"float8.exclude: expected a module, a tensor or tensors"):
        fastamp.float8.exclude(3)


PARAMS = ("weight", "bias")


class Blocks(nn.Module):
    """Two blocks that share a layer, a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))
        self.blocks[1].append(self.blocks[0][0])
        self.lm_head = nn.Linear(16, 16, bias=False)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("lm_head", {"lm_head.weight"}),
        ("*head", {"lm_head.weight"}),
        ("1.1.bias", {"blocks.0.0.bias"}),
        ("blocks.1", {f"blocks.{i}.0.{p}" for i in (0, 1) for p in PARAMS}),
        (nn.Embedding, {"table.weight"}),
        (nn.ReLU, set()),
        (lambda _, name: name == "blocks.1.1", {f"blocks.0.0.{p}" for p in PARAMS}),
        (lambda module, name: "head" in name and module.bias is None, {"lm_head.weight"}),
        (lambda *_: False, set()),
    ],
)
def test_weights_are_excluded_by_name_type_and_function(where: Any, expected: set[str]):
    model = Blocks()
    with fastamp.float8.exclude(model, where=where):
        found = {name for name, p in model.named_parameters() if _C.is_excluded_from_float8(p)}
    assert found == expected
    assert not any(_C.is_excluded_from_float8(p) for p in model.parameters())


@pytest.mark.parametrize(
    ("weights", "where", "error", "text"),
    [
        (nn.Linear(2, 2), "head", ValueError, "a name of weights of the module, got 'head', which"),
        (nn.Linear(2, 2), "", ValueError, "got '', which no weight has"),
        (nn.Linear(2, 2), 3, TypeError, "a name, a type of modules or a function, got 3"),
        (nn.Linear(2, 2), int, TypeError, "a name, a type of modules or a function, got <class"),
        (torch.ones(2), "head", TypeError, "a module where `where` is given, got Tensor"),
    ],
)
def test_exclusions_of_no_weight_are_refused(weights: Any, where: Any, error: type, text: str):
    with pytest.raises(error, match=f"float8.exclude: expected .*{text}"):
        fastamp.float8.exclude(weights, where=where)
    assert not _C.are_weights_excluded_from_float8()


def test_an_exclusion_does_not_keep_its_weights_alive():
    import gc
    import weakref

    layer = nn.Linear(32, 16)
    exclusion = fastamp.float8.exclude(layer)
    gone = weakref.ref(layer.weight)
    del layer
    gc.collect()
    assert gone() is None
    exclusion.release()
