# SPDX-License-Identifier: Apache-2.0
"""DDP's hooks of fastamp.distributed on two and four gloo processes, against float64 sums."""

from __future__ import annotations

import pytest
import torch

import fastamp
from support.ddp_hook_cases import BF16, EDGES, FP16, SHAPES, STEPS, given

dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
views = pytest.mark.parametrize("view", [False, True], ids=["copies", "bucket views"])


@pytest.fixture
def results(ranks):
    return [rank["hooks"] for rank in ranks]


def all_given(count, kind, dtype=torch.float32):
    """The gradients of all ranks, in float64, stacked for each weight."""
    lists = [given(rank, kind, dtype) for rank in range(count)]
    return [torch.stack(tensors).double() for tensors in zip(*lists, strict=True)]


def assert_same(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def unit(dtype):
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


@dtypes
@views
def test_sums_that_fit_are_exact_and_rounded_once(results, dtype, view):
    expected = [g.mean(0).to(dtype) for g in all_given(len(results), "whole", dtype)]
    for rank in results:
        for means in rank["fp32", dtype, "whole", view]:
            assert_same(means, expected)


def excess(means, gradients, dtype):
    """How far means are beyond one rounding to 16 bits and the roundings of float32 sums."""
    worst = 0.0
    for mean, g in zip(means, gradients, strict=True):
        exact = g.mean(0)
        allowed = exact.abs() * unit(dtype) + len(g) * 2.0**-23 * g.abs().mean(0)
        allowed += 2.0**-25 if dtype == FP16 else 0.0  # Half of its smallest number.
        worst = max(worst, ((mean.double() - exact).abs() / allowed).max().item())
    return worst


@dtypes
def test_sums_of_any_size_are_rounded_to_16_bits_once(results, dtype):
    gradients = all_given(len(results), "wide", dtype)
    for rank in results:
        for means in rank["fp32", dtype, "wide", True]:
            assert excess(means, gradients, dtype) <= 1.0
    if len(results) > 2:  # Two numbers are rounded once by torch's sum, too.
        assert excess(results[0]["plain", dtype][0], gradients, dtype) > 1.0


def test_means_that_fit_neither_overflow_nor_underflow(results):
    for rank in results:
        assert_same([rank["edges"]], [torch.tensor(EDGES, dtype=FP16)])
        assert rank["plain edges"][1] == 0.0  # DDP divides first.


@dtypes
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(results, dtype):
    for rank in results:
        for means in (rank["bad", dtype], rank["compressed", dtype]["bad values"]):
            bad = [(~mean.isfinite()).nonzero().tolist() for mean in means]
            if dtype == FP16 and means[0].dtype == torch.float32:
                assert [1] in bad[0]  # Without a scale, what is too large may follow it.
                assert [3] in bad[2]
            else:
                assert bad == [[[1]], [], [[3]]]


def test_wider_buckets_have_the_bits_of_ddp_without_a_hook(results):
    pairs = [pair for rank in results for pair in rank["wider"] + (rank["three"] or [])]
    assert len(pairs) == (4 if len(results) == 2 else 8 + 6)
    for plain, hooked in pairs:
        for means, others in zip(plain, hooked, strict=True):
            assert_same(means, others)


def bound(gradients, dtype):
    """What a sum of STEPS means may differ by: the last errors, and the errors of errors.

    A rounding leaves at most `unit` of what was rounded. The last one of each kind, of gradients
    and of their mean, is still to be sent. Each step loses what an error loses in bfloat16, and the
    roundings of float32.
    """
    sizes = gradients.abs().mean(0)
    per_step = 2 * unit(dtype) * unit(BF16) + 8 * 2.0**-24
    return sizes * (2 * 1.02 * unit(dtype) + STEPS * per_step)


def worst_ratio(sums, gradients, dtype, steps=STEPS):
    ratios = [
        ((total - steps * g.mean(0)).abs() / bound(g, dtype)).max().item()
        for total, g in zip(sums, gradients, strict=True)
    ]
    return max(ratios)


@dtypes
def test_with_error_feedback_sums_over_steps_are_those_of_float64(results, dtype):
    gradients = all_given(len(results), "normal")
    for rank in results:
        found = rank["compressed", dtype]
        for sums in found["with"]:  # In bfloat16, of two models with one hook.
            assert worst_ratio(sums, gradients, dtype) <= 1.0
        assert worst_ratio(found["without"], gradients, dtype) > 2.0


@dtypes
def test_a_step_that_is_not_finite_does_not_stay_in_the_errors(results, dtype):
    for rank in results:
        sums = rank["compressed", dtype]["bad"]
        assert all(total.isfinite().all() for total in sums)
        # One rounding more of each kind is lost.
        assert worst_ratio(sums, all_given(len(results), "scaled"), dtype, STEPS - 1) <= 2.0


def test_float16_is_scaled_where_torchs_hook_overflows_and_underflows(results):
    for rank in results:
        _, small, large = rank["torch's fp16"]
        assert not large.isfinite().any()
        assert small.count_nonzero() < small.numel()
        assert all(total.isfinite().all() for total in rank["compressed", FP16]["without"])


@dtypes
def test_16_bit_buckets_are_compressed_as_they_are(results, dtype):
    for rank in results:
        others = rank["fp32", dtype, "whole", False]
        for means, expected in zip(rank["compressed", dtype]["16-bit"], others, strict=True):
            assert_same(means, expected)


def test_wider_dtypes_are_not_compressed(results):
    for rank in results:
        plain = rank["wider"][1][0]
        for means, others in zip(rank["double"], plain, strict=True):
            assert_same(means, others)


@dtypes
def test_errors_follow_the_scale_of_a_gradient_scaler(results, dtype):
    expected = all_given(len(results), "normal")
    # What is fed back is as large as what one rounding of own gradients and of the mean takes.
    allowed = [4 * unit(dtype) * g.abs().max() for g in expected]
    for rank in results:
        off = [0.0] * len(expected)
        for means in rank["compressed", dtype]["scaler"]:
            for i, (mean, wanted) in enumerate(zip(means, expected, strict=True)):
                difference = mean - wanted.mean(0)
                assert difference.abs().max() <= allowed[i]
                off[i] = off[i] + difference
                assert off[i].abs().max() <= allowed[i]


@dtypes
def test_reset_forgets_the_errors(results, dtype):
    for rank in results:
        first, after_reset, later = rank["compressed", dtype]["reset"]
        assert_same(first, after_reset)
        assert not all(torch.equal(a, b) for a, b in zip(first, later, strict=True))


def test_all_ranks_get_the_same_bits(results):
    first, *others = results
    for other in others:
        for dtype in (BF16, FP16):
            for key in ("without", "bad"):
                assert_same(first["compressed", dtype][key], other["compressed", dtype][key])
            assert_same(
                first["fp32", dtype, "wide", True][1], other["fp32", dtype, "wide", True][1]
            )


def test_hooks_say_what_they_do_not_take(results):
    wanted = {
        "bucket": "TypeError: {}: expected bucket to be a GradBucket, got Tensor; "
        "DistributedDataParallel.register_comm_hook makes DDP call the hook",
        "state": "TypeError: {}: expected state to be a ProcessGroup or None, got int",
        "sparse": "NotImplementedError: {}: expected dense gradients, got a bucket of layout "
        "torch.sparse_coo",
    }
    group = "ValueError: {}: expected a group that this process is a member of, got one without it"
    for number, rank in enumerate(results):
        for name, function in (("fp32", "fp32_reduce_hook"), ("compress", "compress_hook")):
            for what, text in wanted.items():
                assert rank["refusals"][f"{name} {what}"] == text.format(function)
            found = rank["refusals"][f"{name} group"]
            assert found == (group if number else wanted["bucket"]).format(function)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("bfloat16",), TypeError, "expected dtype to be a torch.dtype, got str"),
        ((torch.float8_e4m3fn,), ValueError, "got torch.float8_e4m3fn"),
        ((torch.float32,), ValueError, "expected dtype to be torch.bfloat16 or torch.float16"),
        ((BF16, 1), TypeError, "expected error_feedback to be a bool, got int"),
    ],
)
def test_compress_hook_refuses_other_arguments(arguments, error, text):
    with pytest.raises(error, match=f"^compress_hook: .*{text}"):
        fastamp.distributed.compress_hook(*arguments)


def test_hooks_need_a_group():
    with pytest.raises(ValueError, match="expected a process group to be initialized, got none"):
        fastamp.distributed.fp32_reduce_hook(None, torch.ones(1))


def test_models_without_ddp_have_no_hooks():
    with pytest.raises(AttributeError, match="register_comm_hook"):
        torch.nn.Linear(1, 1).register_comm_hook(None, fastamp.distributed.fp32_reduce_hook)


def test_the_cases_cover_shapes_that_ranks_cannot_share_evenly():
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    assert any(size % 2 for size in sizes)
    assert any(size % 4 for size in sizes)
