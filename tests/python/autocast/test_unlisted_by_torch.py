# SPDX-License-Identifier: Apache-2.0
"""Ops with a line in the table that torch autocasts nowhere: batch_norm and _grouped_mm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

import fastamp
from support.autocast_state import torch_kernels

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW = (BF16, FP16)


@pytest.fixture(autouse=True)
def default_policies_after() -> Iterator[None]:
    yield
    fastamp.policies.reset()


def operands(
    input_dtype: torch.dtype, weight_dtype: torch.dtype, statistics_dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 3, 5, generator=generator) * 3 + 2
    parameters = [torch.rand(3, generator=generator) for _ in range(2)]
    statistics = [torch.zeros(3), torch.ones(3)]
    return (
        x.to(input_dtype),
        [p.to(weight_dtype).requires_grad_() for p in parameters],
        [s.to(statistics_dtype) for s in statistics],
    )


def reference(
    x: torch.Tensor, parameters: list[torch.Tensor], statistics: list[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Batch norm of a training step in float64, written out: result and new statistics."""
    x, (weight, bias), (mean, var) = (
        x.double(),
        [p.detach().double() for p in parameters],
        [s.double() for s in statistics],
    )
    count = x.numel() / x.shape[1]
    now = x.mean((0, 2))
    spread = ((x - now[:, None]) ** 2).mean((0, 2))
    out = (x - now[:, None]) / (spread[:, None] + 1e-5).sqrt() * weight[:, None] + bias[:, None]
    return out, [mean * 0.9 + now * 0.1, var * 0.9 + spread * count / (count - 1) * 0.1]


@pytest.mark.parametrize("op", ["batch_norm", "_grouped_mm"])
def test_by_default_they_are_what_torch_makes_of_them(op: str):
    assert {fastamp.policies.get(op, device) for device in ("cpu", "cuda")} == {"pass"}
    for device in ("CPU", "CUDA"):
        key = f"Autocast{device}"
        assert f"aten::{op}" not in torch._C._dispatch_get_registrations_for_dispatch_key(key)


def test_batch_norm_as_torch_by_default():
    x, parameters, own = operands(BF16, FP32, FP32)
    torchs = [s.clone() for s in own]
    with fastamp.autocast("cpu", dtype=BF16):
        out = functional.batch_norm(x, *own, *parameters, training=True)
    with torch_kernels(), torch.autocast("cpu", dtype=BF16):
        expected = functional.batch_norm(x, *torchs, *parameters, training=True)
    assert out.dtype == BF16
    assert torch.equal(out, expected)
    assert all(map(torch.equal, own, torchs))


@pytest.mark.parametrize("statistics_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("weight_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("input_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(("policy", "runs_in"), [("lower", BF16), ("fp32", FP32)])
def test_every_mix_runs_and_writes_the_statistics(
    policy: str,
    runs_in: torch.dtype,
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    statistics_dtype: torch.dtype,
):
    """Where torch takes few mixes; and a cast statistic is written back, rounded once."""
    x, parameters, statistics = operands(input_dtype, weight_dtype, statistics_dtype)
    expected, new_statistics = reference(x, parameters, statistics)
    fastamp.policies.set("batch_norm", policy, "cpu")
    with fastamp.autocast("cpu", dtype=BF16):
        out = functional.batch_norm(x, *statistics, *parameters, training=True)
    assert out.dtype == runs_in
    is_low = BF16 in (runs_in, input_dtype) or FP16 in (runs_in, input_dtype, weight_dtype)
    torch.testing.assert_close(out.double(), expected, rtol=0.02 if is_low else 1e-5, atol=0.03)
    for statistic, wanted in zip(statistics, new_statistics, strict=True):
        assert statistic.dtype == statistics_dtype
        # All in bfloat16, torch's own arithmetic rounds twice.
        tolerance = {FP32: 1e-5, FP16: 2**-11, BF16: 2**-7}[statistics_dtype]
        # An input that was rounded to bfloat16 has a mean of its own.
        tolerance = max(tolerance, 2**-8 if runs_in == BF16 else 0)
        torch.testing.assert_close(statistic.double(), wanted, rtol=tolerance, atol=1e-6)


def test_promote_takes_the_widest_dtype_of_all_arguments():
    fastamp.policies.set("batch_norm", "promote", "cpu")
    for input_dtype, weight_dtype, expected in (
        (BF16, FP32, FP32),
        (BF16, BF16, BF16),
        (FP16, FP16, FP32),
    ):
        x, parameters, statistics = operands(input_dtype, weight_dtype, weight_dtype)
        with fastamp.autocast("cpu", dtype=BF16):
            out = functional.batch_norm(x, *statistics, *parameters, training=True)
        assert out.dtype == expected


def test_evaluation_writes_no_statistics_and_float64_is_left():
    fastamp.policies.set("batch_norm", "fp32", "cpu")
    x, parameters, statistics = operands(BF16, BF16, BF16)
    before = [(s.clone(), s._version) for s in statistics]
    with fastamp.autocast("cpu", dtype=BF16):
        out = functional.batch_norm(x, *statistics, *parameters, training=False)
        double = functional.batch_norm(x.double(), None, None, training=True)
    assert (out.dtype, double.dtype) == (FP32, FP64)
    for statistic, (value, version) in zip(statistics, before, strict=True):
        assert torch.equal(statistic, value)
        assert statistic._version == version


def test_a_module_trains_under_the_policy_and_banned_refuses():
    module = torch.nn.BatchNorm1d(3)
    x = torch.randn(8, 3, dtype=BF16, requires_grad=True)
    with (
        fastamp.debug.trace() as seen,
        fastamp.autocast("cpu", dtype=BF16),
        fastamp.policies.override({"batch_norm": "fp32"}),
    ):
        out = module(x)
    out.square().sum().backward()
    assert out.dtype == FP32
    assert x.grad is not None
    assert x.grad.dtype == BF16
    assert module.weight.grad is not None
    assert module.running_mean is not None
    assert bool(module.running_mean.ne(0).all())
    (row,) = [row for row in seen.rows if row.op == "batch_norm"]
    assert (row.policy, row.run_dtype, row.other_casts) == ("fp32", "float32", 1)
    refuses = pytest.raises(RuntimeError, match="batch_norm: not allowed under autocast")
    with fastamp.autocast("cpu"), fastamp.policies.override({"batch_norm": "banned"}), refuses:
        module(x)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no _grouped_mm")
def test_grouped_mm_mixes_dtypes_if_told_to():
    """pytorch #174763: inputs that a norm made float32 meet weights of 16 bits."""
    x = torch.randn(8, 16, requires_grad=True)
    w = torch.randn(2, 16, 32, dtype=BF16, requires_grad=True)
    ends = torch.tensor([4, 8], dtype=torch.int32)
    with fastamp.autocast("cpu", dtype=BF16):
        with pytest.raises(RuntimeError):
            torch._grouped_mm(x, w, offs=ends)
        with fastamp.policies.override({"_grouped_mm": "lower"}):
            out = torch._grouped_mm(x, w, offs=ends)
    assert out.dtype == BF16
    expected = torch.cat([x[:4].to(BF16) @ w[0], x[4:].to(BF16) @ w[1]])
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.1)
    (out * torch.ones_like(out)).sum().backward()
    assert x.grad is not None
    assert (x.grad.dtype, w.grad.dtype) == (FP32, BF16)  # type: ignore[union-attr]
