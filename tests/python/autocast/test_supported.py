# SPDX-License-Identifier: Apache-2.0
"""The preset "supported" and the policy lower_dense: sparse products and FFTs run in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import fastamp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Op = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def default_policies_after() -> Iterator[None]:
    known = {row.op for row in fastamp.policies.table()}
    yield
    fastamp.policies.reset()
    assert {row.op for row in fastamp.policies.table()} >= known
    for row in fastamp.policies.table():
        if row.op not in known:
            fastamp.policies.unregister_op(row.op if "." in row.op else f"{row.op}.default")


FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coordinates": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
}
OPS: dict[str, Op] = {
    "@": lambda a, x: a @ x,
    "from the right": lambda a, x: x @ a,
    "mv": lambda a, x: a @ x[0],
    "sparse.mm": torch.sparse.mm,
    "sparse.addmm": lambda a, x: torch.sparse.addmm(x, a, x),
    "addmm": lambda a, x: torch.addmm(x, a, x),
    "linear": lambda a, x: nn.functional.linear(x, a),
    "bmm": lambda a, x: torch.bmm(torch.stack([a, a]), torch.stack([x, x])),
    "itself": lambda a, x: torch.sparse.mm(a, a).to_dense(),  # noqa: ARG005
    "sampled_addmm": lambda a, x: torch.sparse.sampled_addmm(a, x, x).to_dense(),
    "reduce": lambda a, x: torch.sparse.mm(a, x, "mean"),
    "hspmm": lambda a, x: torch.hspmm(a, x).to_dense(),
}


def operands(form: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4, 4, generator=generator).relu()
    return FORMATS[form](a), torch.randn(4, 4, generator=generator).to(dtype)


def has_kernel(form: str, op: str) -> bool:
    """Whether torch computes it in float32."""
    try:
        OPS[op](*operands(form, FP32))
    except (RuntimeError, NotImplementedError):
        return False
    return True


CASES = [(form, op) for form in FORMATS for op in OPS if has_kernel(form, op)]


def presets() -> list[Callable[[], AbstractContextManager[Any]]]:
    return [
        lambda: fastamp.policies.preset("supported"),
        lambda: fastamp.policies.override("supported"),
    ]


@pytest.mark.parametrize("make", presets(), ids=["preset", "override"])
@pytest.mark.parametrize("given", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("form", "op"), CASES)
def test_sparse_products_are_those_of_float32(
    form: str, op: str, dtype: torch.dtype, given: torch.dtype, make: Any
):
    a, x = operands(form, given)
    expected = OPS[op](a, x.float())
    with make(), fastamp.autocast("cpu", dtype=dtype):
        found = OPS[op](a, x)
    assert found.dtype == FP32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("form", ["csr", "csc", "bsr"])
def test_torch_refuses_them_without(form: str):
    a, x = operands(form, FP32)
    with fastamp.autocast("cpu", dtype=BF16), pytest.raises(RuntimeError, match="not implemented"):
        a @ x


@pytest.mark.parametrize("form", ["coordinates", "csr", "csc"])  # Of BSR torch has none.
def test_gradients_reach_both_operands(form: str):
    gradients = []
    for in_region in (True, False):
        a, x = operands(form, FP32)
        wants_a = form in ("coordinates", "csr")  # of the others torch has no gradient
        a.requires_grad_(wants_a)
        x.requires_grad_()
        with (
            fastamp.policies.preset("supported"),
            fastamp.autocast("cpu", dtype=BF16, enabled=in_region),
        ):
            loss = torch.sparse.mm(a, x).square().sum()
        loss.backward()
        assert x.grad is not None
        found = [x.grad]
        if wants_a:
            assert a.grad is not None
            found.append(a.grad.to_dense())
        gradients.append(found)
    for mine, torchs in zip(*gradients, strict=True):
        assert torch.equal(mine, torchs)


DENSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mm": lambda x: x @ x,
    "addmm": lambda x: torch.addmm(x, x, x),
    "linear": lambda x: nn.functional.linear(x, x),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "conv": lambda x: nn.functional.conv2d(x[None, None], x[None, None]),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
    "softmax": lambda x: x.softmax(1),
    "sum": lambda x: x.sum(),
    "add": lambda x: x + x.bfloat16(),
}


@pytest.mark.parametrize("op", DENSE)
def test_all_else_has_torchs_bits(op: str):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with fastamp.autocast("cpu", dtype=BF16):
        before = DENSE[op](x)
        with fastamp.policies.override("supported"):
            after = DENSE[op](x)
    assert after.dtype == before.dtype
    assert torch.equal(after, before)


FFTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rfft": torch.fft.rfft,
    "fft": torch.fft.fft,
    "fft2": torch.fft.fft2,
    "irfft": lambda x: torch.fft.irfft(x[:, :3] * 1),
    "stft": lambda x: torch.stft(x[0], 4, return_complex=True, window=torch.ones(4)),
}


@pytest.mark.parametrize("op", FFTS)
def test_ffts_are_cast_on_cuda_too(op: str):
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).half()
    expected = FFTS[op](x.float())
    with (
        fastamp.policies.copy_from("cuda", device="cpu"),  # where torch casts none
        fastamp.policies.override("supported"),
        fastamp.autocast("cpu", dtype=FP16),
    ):
        assert torch.equal(FFTS[op](x), expected)


def test_both_devices_have_the_policies():
    with fastamp.policies.preset("supported"):
        for device in ("cpu", "cuda"):
            for op in ("mm", "addmm", "bmm", "linear", "matmul"):
                assert fastamp.policies.get(op, device) == "lower_dense"
            for op in ("fft_rfft", "fft_fftn", "stft", "hspmm", "sparse_sampled_addmm"):
                assert fastamp.policies.get(op, device) == "fp32"
    assert fastamp.policies.get("mm", "cuda") == "lower"


def test_one_device_alone():
    with fastamp.policies.preset("supported", "cuda"):
        assert fastamp.policies.get("mm", "cuda") == "lower_dense"
        assert fastamp.policies.get("mm", "cpu") == "lower"


def test_a_single_op_and_a_module_may_have_the_policy():
    a, x = operands("csr", FP32)
    fastamp.policies.set("mm", "lower_dense", "cpu")
    with fastamp.autocast("cpu", dtype=BF16):
        assert torch.mm(a, x).dtype == FP32
        assert torch.mm(x, x).dtype == BF16

    class Graph(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return a @ x

    model = nn.Sequential(Graph())
    fastamp.policies.reset()
    policies = fastamp.policies.for_modules(
        model, {"0": {"mm": "lower_dense", "matmul": "lower_dense"}}
    )
    with policies, fastamp.autocast("cpu", dtype=BF16):
        assert model(x).dtype == FP32


def test_registered_ops_may_have_it_and_others_may_not():
    with torch.library._scoped_library("fastamp_test", "FRAGMENT") as library:
        library.define("product_of(Tensor a, Tensor b) -> Tensor")
        library.impl("product_of", torch.mm, "CompositeExplicitAutograd")
        fastamp.policies.register_op("fastamp_test::product_of", "lower_dense")
        a, x = operands("csr", FP32)
        with fastamp.autocast("cpu", dtype=BF16):
            assert torch.ops.fastamp_test.product_of(a, x).dtype == FP32
            assert torch.ops.fastamp_test.product_of(x, x).dtype == BF16
        fastamp.policies.unregister_op("fastamp_test::product_of")
    with pytest.raises(ValueError, match="lower_dense"):
        fastamp.policies.set("lstm_cell", "lower_dens")
    with pytest.raises(ValueError, match="can carry"):
        fastamp.policies.register_op("aten::add_.Tensor", "lower_dense")


def test_a_trace_and_check_see_it():
    a, x = operands("csr", FP32)
    with (
        fastamp.policies.override("supported"),
        fastamp.debug.trace() as trace,
        fastamp.autocast("cpu", dtype=BF16),
    ):
        torch.mm(a, x)
        torch.mm(x, x)
    rows = {row["run_dtype"]: row for row in trace.to_dict()["ops"] if row["op"] == "mm"}
    assert set(rows) == {"float32", "bfloat16"}
    assert all(row["policy"] == "lower_dense" for row in rows.values())


def test_an_unknown_preset_names_all():
    with pytest.raises(ValueError, match=r"torch, cuda, OD, wide, supported"):
        fastamp.policies.preset("sparse")
