# SPDX-License-Identifier: Apache-2.0
"""Both gradient passes beside the flag: counts, the sum of unscale_, clipping by norm."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.amp_reference import DEVICES, DTYPES, assert_same_bits, fp32, unscale_, unscaled

norm_ = torch.ops.fastamp.norm_and_check_
devices = pytest.mark.parametrize("device", DEVICES)
SINGLE = tuple(d for d in DTYPES if d is not torch.float64)
SIZES = (0, 1, 15, 16, 17, 1023, 1024, 2047, 2048, 2049, 6000)


def grads_of(sizes, dtypes, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, generator=generator, dtype=torch.float64) * 100).to(d).to(device)
        for n in sizes
        for d in dtypes
    ]


def unscale(grads, inv_scale, counts=None):
    """(flag, sum of squares) of unscale_, which changes the gradients."""
    device = grads[0].device if grads else torch.device("cpu")
    flag = torch.zeros((), device=device)
    total = torch.full((), -7.0, dtype=torch.float64, device=device)
    inverse = torch.tensor(inv_scale, device=device)
    unscale_(grads, inverse, flag, sum_of_squares=total, non_finite_counts=counts)
    return flag.item(), total.item()


def norm(grads, inv_scale, counts=None, **outputs):
    device = grads[0].device if grads else torch.device("cpu")
    flag = torch.zeros((), device=device)
    total = torch.full((), -7.0, dtype=torch.float64, device=device)
    inverse = torch.tensor(inv_scale, device=device)
    norm_(grads, inverse, flag, total, non_finite_counts=counts, **outputs)
    return flag.item(), total.item()


def expected_counts(grads):
    return [[int(g.isinf().sum()), int(g.isnan().sum())] for g in grads]


@devices
@pytest.mark.parametrize("inv_scale", [1.0, 1 / 65536, 3.1])
def test_unscale_gives_the_sum_of_the_reading_pass_bit_for_bit(device, inv_scale):
    grads = grads_of(SIZES, SINGLE, device)
    grads += [grads[-3].view(60, 100).t(), grads[-6].view(-1)[::2]]
    expected = norm([g.clone() for g in grads], inv_scale)
    mine = [g.clone(memory_format=torch.preserve_format) for g in grads]
    assert unscale(mine, inv_scale) == expected
    for got, grad in zip(mine, grads, strict=True):
        assert_same_bits(got, unscaled(grad, fp32(inv_scale)))


@devices
def test_sum_of_fp64_gradients(device):
    grads = grads_of(SIZES, DTYPES, device)
    exact = math.fsum(x * x for g in grads for x in g.double().flatten().tolist()) * 0.25
    flag, total = unscale(grads, 0.5)
    assert flag == 0.0
    assert total == pytest.approx(exact, rel=1e-13, abs=0.0)
    # Squares that overflow make no overflow of the gradients.
    counts = torch.full((1, 2), 9, device=device)
    huge = torch.full((3000,), 1e200, dtype=torch.float64, device=device)
    assert unscale([huge], 0.5, counts) == (0.0, math.inf)
    assert counts.tolist() == [[9, 9]]
    huge[7] = -math.inf
    assert unscale([huge], 0.5, counts)[0] == 1.0
    assert counts.tolist() == [[1, 0]]


@pytest.mark.parametrize("extra", [0, 1, 2047])
def test_unscale_with_sums_has_the_same_bits_for_any_number_of_threads(extra):
    sizes = [n + extra for n in (300_001, 77, 0, 131_072)]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            mine = grads_of(sizes, DTYPES)
            mine[3][0], mine[0][-1], mine[2][5] = math.nan, math.inf, -math.inf
            counts = torch.zeros(len(mine), 2, dtype=torch.int64)
            total = torch.zeros((), dtype=torch.float64)
            unscale_(mine, torch.tensor(1 / 3), torch.zeros(()), sum_of_squares=total,
                     non_finite_counts=counts)  # fmt: skip
            results.append((mine, counts.tolist(), unscale(grads_of(sizes, DTYPES), 1 / 3)))
    finally:
        torch.set_num_threads(before)
    for mine, counts, sums in results[1:]:
        assert (counts, sums) == results[0][1:]
        for got, first in zip(mine, results[0][0], strict=True):
            assert_same_bits(got, first)


def counts_of_products(grads, inv_scale):
    """NaN, and everything else whose product is not finite."""
    counts = []
    for grad in grads:
        is_nan = grad.isnan()
        overflows = ~(grad * torch.tensor(inv_scale, dtype=torch.float32)).isfinite() & ~is_nan
        counts.append([int(overflows.sum()), int(is_nan.sum())])
    return counts


@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    bad=st.lists(
        st.tuples(
            st.integers(0, 5),
            st.integers(0, 4999),
            st.sampled_from([math.inf, -math.inf, math.nan]),
        ),
        max_size=30,
    ),
    inv_scale=st.sampled_from([1.0, 0.25, 0.0, 3e38]),
)
@settings(max_examples=80, deadline=None)
def test_counts_are_those_of_the_gradients_and_of_products_that_overflow(
    sizes, seed, bad, inv_scale
):
    grads = grads_of(sizes, DTYPES, seed=seed)
    for tensor, element, value in bad:
        if sizes[tensor % len(sizes)] > 0:
            grad = grads[(tensor % len(sizes)) * len(DTYPES) + element % len(DTYPES)]
            grad[element % grad.numel()] = value
    single = [g for g in grads if g.dtype is not torch.float64]
    for call, mine in ((unscale, [g.clone() for g in grads]), (norm, single)):
        counts = torch.full((len(mine), 2), 9)
        flag, _ = call(mine, inv_scale, counts)
        # Products as they are stored, or in float32 for a step that multiplies what it reads.
        factors = grads if call is unscale else [g.float() for g in single]
        want = counts_of_products(factors, inv_scale)
        found = any(map(any, want))
        assert flag == float(found)
        assert counts.tolist() == (want if found else [[9, 9]] * len(mine))


@devices
def test_counts_tell_of_the_last_overflow(device):
    grads = [torch.ones(3000, device=device), torch.ones(2, device=device)]
    counts = torch.full((2, 2), 9, device=device)
    norm(grads, 1.0, counts)
    assert counts.tolist() == [[9, 9], [9, 9]]
    grads[0][2500:] = math.nan
    grads[0][:10] = -math.inf
    norm(grads, 1.0, counts)
    assert counts.tolist() == [[10, 500], [0, 0]]
    grads[0].fill_(1.0)
    norm(grads, 1.0, counts)
    assert counts.tolist() == [[10, 500], [0, 0]]
    grads[1][1] = math.inf
    norm(grads, 1.0, counts)
    assert counts.tolist() == [[0, 0], [1, 0]]


@devices
@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0, 1e6, math.inf, -2.0])
@pytest.mark.parametrize("special", [None, math.inf, math.nan])
def test_clip_coefficient_is_that_of_torch(device, max_norm, special):
    for seed in range(10):
        grads = grads_of((100, 7, 3000), (torch.float32,), device, seed)
        if special is not None:
            grads[1][3] = special
        outputs = {
            "max_norm": max_norm,
            "clip_coef": torch.full((), -1.0, device=device),
            "total_norm": torch.full((1,), -1.0, device=device),
        }
        _, total = norm(grads, 0.5, **outputs)
        rounded = torch.tensor(total, dtype=torch.float64, device=device).sqrt().float()
        assert_same_bits(outputs["total_norm"], rounded.view(1))
        # A gradient of 1 shows the factor that torch applies for this norm.
        one = torch.ones(1, device=device, requires_grad=True)
        one.grad = torch.ones(1, device=device)
        torch.nn.utils.clip_grads_with_norm_([one], max_norm, rounded)
        assert_same_bits(outputs["clip_coef"].view(1), one.grad)


@devices
def test_zero_gradients_are_not_clipped(device):
    outputs = {
        "max_norm": 1.0,
        "clip_coef": torch.zeros((), device=device),
        "total_norm": torch.ones((), device=device),
    }
    norm([torch.zeros(5, device=device)], 1.0, **outputs)
    assert (outputs["clip_coef"].item(), outputs["total_norm"].item()) == (1.0, 0.0)


@devices
def test_versions_of_outputs_move(device):
    grads = [torch.ones(5, device=device)]
    inverse, flag = torch.ones((), device=device), torch.zeros((), device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    counts = torch.zeros(1, 2, dtype=torch.int64, device=device)
    clip, size = torch.zeros((), device=device), torch.zeros((), device=device)
    norm_(grads, inverse, flag, total, non_finite_counts=counts, max_norm=1.0, clip_coef=clip,
          total_norm=size)  # fmt: skip
    assert [t._version for t in (flag, total, counts, clip, size)] == [1] * 5
    unscale_(grads, inverse, flag, sum_of_squares=total, non_finite_counts=counts)
    assert [t._version for t in (flag, total, counts, inverse)] == [2, 2, 2, 0]


@devices
def test_opcheck_of_unscale_with_outputs(device):
    half, flag = torch.tensor(0.5, device=device), torch.zeros(1, device=device)
    for grads in ([], [torch.randn(4, 6, device=device)[:, ::2], torch.ones(5, device=device)]):
        outputs = {
            "sum_of_squares": torch.zeros((), dtype=torch.float64, device=device),
            "non_finite_counts": torch.zeros(len(grads), 2, dtype=torch.int64, device=device),
        }
        torch.library.opcheck(unscale_, (grads, half, flag), outputs)


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ({"sum_of_squares": torch.zeros(())}, TypeError, "sum_of_squares to be Double, got Float"),
        (
            {"sum_of_squares": torch.zeros(2).double()},
            ValueError,
            "expected sum_of_squares to have one element, got 2",
        ),
        (
            {"non_finite_counts": torch.zeros(2, dtype=torch.int64)},
            ValueError,
            r"non_finite_counts to be contiguous of shape \[1, 2\], got shape \[2\]",
        ),
    ],
)
def test_refused_outputs_of_unscale_change_nothing(outputs, error, message):
    grad, flag = torch.tensor([2.0, math.inf]), torch.zeros(())
    with pytest.raises(error, match="unscale_and_check_: .*" + message):
        unscale_([grad], torch.tensor(0.5), flag, **outputs)
    assert grad.tolist() == [2.0, math.inf]
    assert flag.item() == 0.0
    assert not any(t.any() for t in outputs.values())
