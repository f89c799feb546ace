# SPDX-License-Identifier: Apache-2.0
"""Regions in fp8 on the simulated device, at the compute capability that it was started with.

Products are the CPU's, behind what cuBLAS demands of layouts, sizes and dtypes; casts are the
emulated kernels. So results have the bits of the same region on the CPU.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch

import fastamp
from support.children import check_program
from support.float8 import E4M3
from support.simulated_cuda import counted

pytestmark = pytest.mark.simulated
BF16, FP16 = torch.bfloat16, torch.float16
ALL_SIZES = fastamp.float8.Recipe(small_size=(0, 0))


def has_float8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


def model_of(width: int, *, bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, width, bias=bias), torch.nn.ReLU(), torch.nn.Linear(width, 32)
    )


def results_of(model, x, dtype, recipe):
    """Output and all gradients, on the CPU."""
    x = x.clone().requires_grad_()
    with fastamp.autocast(x.device.type, dtype=dtype, float8=recipe):
        y = model(x)
    y.backward(torch.ones_like(y) / 8)
    return [t.detach().cpu() for t in (y, x.grad, *(p.grad for p in model.parameters()))]


CASES = {
    "bf16": ((16, 32), 64, BF16, ALL_SIZES),
    "fp16": ((16, 32), 64, FP16, ALL_SIZES),
    "three dimensions": ((4, 8, 32), 64, BF16, ALL_SIZES),
    "rows that are no multiple of 16": ((5, 32), 64, BF16, ALL_SIZES),
    "gradients in e4m3": (
        (16, 32),
        64,
        BF16,
        fastamp.float8.Recipe(small_size=(0, 0), grad_dtype=E4M3),
    ),
}


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*expected a GPU of compute capability")
def test_results_are_those_of_the_cpu(case, bias, device):
    shape, width, dtype, recipe = CASES[case]
    on_cpu = model_of(width, bias=bias)
    on_device = copy.deepcopy(on_cpu).to(device)
    x = torch.randn(shape)
    with fastamp.debug.trace() as trace:
        got = results_of(on_device, x.to(device), dtype, recipe)
    linears = {row.float8 for row in trace.rows if row.op == "linear"}
    if has_float8():
        assert linears == {"float8"}
        expected = results_of(on_cpu, x, dtype, recipe)
    else:
        assert linears == {""}  # the region warns, and runs in its dtype
        expected = results_of(on_cpu, x, dtype, False)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_casts_do_not_wait_for_the_device():
    model, x = model_of(64).cuda(), torch.randn(16, 32, device="cuda")
    results_of(model, x, BF16, ALL_SIZES)
    x.requires_grad_()
    with counted("waits", "copies_to_host", "copies_to_device") as counts:
        with fastamp.autocast("cuda", dtype=BF16, float8=ALL_SIZES):
            y = model(x)
        y.backward(torch.ones_like(y))
    assert counts["waits"] == counts["copies_to_host"] == counts["copies_to_device"] == 0


def test_what_cublas_takes_is_asked_for():
    if not has_float8():
        pytest.skip("fp8 products need compute capability 8.9")
    a = torch.ones(16, 32, device="cuda").to(E4M3)
    one = torch.ones((), device="cuda")
    columns = a.t()
    assert torch._scaled_mm(a, columns, one, one, out_dtype=BF16)[0, 0].item() == 32
    for left, right, message in (
        (a[:, :24].contiguous(), columns[:24], "multiples of 16"),
        (a, columns[:, :8], "multiples of 16"),
        (a.to(torch.float8_e5m2), columns.to(torch.float8_e5m2), "multiplies no Float8_e5m2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch._scaled_mm(left, right, one, one, out_dtype=BF16)
    if torch.cuda.get_device_capability() < (10, 0):
        with pytest.raises(RuntimeError, match="rows in fp8 by columns"):
            torch._scaled_mm(a, a.t().contiguous(), one, one, out_dtype=BF16)
    bias = torch.zeros(16, device="cuda")
    with pytest.raises(RuntimeError, match="no bias in that dtype"):
        torch._scaled_mm(a, columns, one, one, bias=bias, out_dtype=BF16)


def test_a_second_micro_batch_is_added_within_the_product():
    """The op of torch 2.15, by its definition; it has no bits of cuBLAS."""
    if not has_float8():
        pytest.skip("fp8 products need compute capability 8.9")
    cases = json.loads(check_program("-m", "support.gradient_sum_cases", "cuda"))
    added = {name for name, case in cases.items() if "_scaled_addmm_.default" in str(case["ops"])}
    assert added == {
        "float32_weights",
        "low_precision_weights",
        "float16_weights_and_gradients",
        "weights_of_mm",
        "used_twice",
        "two_threads",
    }
    assert [
        case for case in cases.values() if "raised" in case or not case.get("equal", True)
    ] == []
    assert cases["another_stream"]["told"] == "torch::autograd::AccumulateGrad"
