# SPDX-License-Identifier: Apache-2.0
"""norm_and_check_: norm against exact arithmetic, flags, reproducibility, the op's contract."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from support.amp_reference import DEVICES, fp32

norm_ = torch.ops.fastamp.norm_and_check_
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 3, 4, 7, 8, 15, 16, 17, 33, 2047, 2048, 2049, 6000)

devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def run(grads, inv_scale=1.0, before=0.0, counts=None, **options):
    """(flag, sum of squares); checks that the gradients and their versions are untouched."""
    device = grads[0].device if grads else torch.device("cpu")
    copies, versions = [g.clone() for g in grads], [g._version for g in grads]
    found_inf = torch.full((), before, device=device)
    total = torch.full((), -7.0, dtype=torch.float64, device=device)
    inverse = torch.tensor(inv_scale, device=device)
    norm_(grads, inverse, found_inf, total, non_finite_counts=counts, **options)
    for grad, copy, version in zip(grads, copies, versions, strict=True):
        assert torch.equal(grad.nan_to_num(nan=3.0), copy.nan_to_num(nan=3.0))
        assert grad._version == version
    assert (found_inf._version, total._version) == (1, 1)
    return found_inf.item(), total.item()


def exact(grads, inv_scale=1.0) -> float:
    """The sum of squares in rational arithmetic, rounded once."""
    total = sum(Fraction(x) ** 2 for g in grads for x in g.double().flatten().tolist())
    return float(total * Fraction(fp32(inv_scale)) ** 2)


def random(numel, dtype, device="cpu"):
    return (torch.randn(numel, dtype=torch.float64) * 1000).to(dtype).to(device)


def check(grads, inv_scale=1.0):
    flag, total = run(grads, inv_scale)
    assert flag == 0.0
    # Every addition rounds once, and none is more than some 100 deep below 10^6 elements.
    assert total == pytest.approx(exact(grads, inv_scale), rel=1e-13, abs=0.0)


@devices
@dtypes
@pytest.mark.parametrize("inv_scale", [1.0, 1 / 65536, 3.1])
def test_every_size(device, dtype, inv_scale):
    for numel in SIZES:
        check([random(numel, dtype, device)], inv_scale)


@devices
def test_mixed_dtypes_in_one_call(device):
    check([random(n, d, device) for n in SIZES for d in DTYPES], 0.5)


@devices
@dtypes
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_anywhere_is_counted_in_its_tensor(device, dtype, bad):
    sizes = (2049, 0, 1, 5000)
    for tensor in (0, 2, 3):
        for element in (0, sizes[tensor] // 2, -1):
            grads = [random(n, dtype, device) for n in sizes]
            grads[tensor][element] = bad
            counts = torch.full((len(sizes), 2), 9, device=device)
            flag, total = run(grads, 0.5, counts=counts)
            assert flag == 1.0
            assert not math.isfinite(total)
            row = [0, 1] if math.isnan(bad) else [1, 0]
            assert counts.tolist() == [row if i == tensor else [0, 0] for i in range(len(sizes))]


@devices
def test_flag_is_never_lowered(device):
    grads = [torch.ones(3, device=device), torch.ones(4, device=device)]
    assert run(grads, before=2.0) == (2.0, 7.0)


@devices
@dtypes
def test_extremes_neither_overflow_nor_vanish(device, dtype):
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    for value in (info.max, info.min, info.smallest_normal, smallest):
        check([torch.full((5000,), value, dtype=dtype, device=device)])


@devices
@dtypes
def test_strides_and_addresses(device, dtype):
    base = random(4096, dtype, device).view(16, 16, 16)
    whole = random(4097, dtype, device)
    for view in (base.transpose(0, 2), base[:, :, ::2], base[3:9, 2:5, 1:15], whole[1:],
                 base[:, :1], torch.ones(1, dtype=dtype, device=device).expand(3000)):  # fmt: skip
        check([view], 0.3)
    # The order of the sums does not depend on the address.
    assert run([whole[1:]]) == run([whole[1:].clone()])


@devices
def test_empty(device):
    assert run([]) == (0.0, 0.0)
    assert run([torch.empty(0, 3, device=device)]) == (0.0, 0.0)


@pytest.mark.parametrize("extra", [0, 1, 63, 2047])
def test_same_bits_for_any_number_of_threads(extra):
    grads = [random(n + extra, d) for n in (300_001, 77, 0, 131_072) for d in DTYPES]
    before = torch.get_num_threads()
    results = set()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.add(run(grads, 1 / 3))
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1


@pytest.mark.graph
@pytest.mark.cuda
def test_same_bits_with_any_table_on_cuda():
    grads = [random(1 + i % 4000, DTYPES[i % 3], "cuda") for i in range(3000)]
    one_launch = run(grads, 1 / 3)
    graph = torch.cuda.CUDAGraph()
    found_inf = torch.zeros((), device="cuda")
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    inv_scale = torch.tensor(1 / 3, device="cuda")
    with torch.cuda.graph(graph):
        norm_(grads, inv_scale, found_inf, total)
    graph.replay()
    assert (found_inf.item(), total.item()) == one_launch


@given(
    sizes=st.lists(st.integers(0, 5000), max_size=8),
    seed=st.integers(0, 2**31),
    inv_scale=st.floats(2.0**-30, 2.0**10, width=32),
    bad=st.none() | st.tuples(st.integers(0, 7), st.integers(0, 4999)),
)
@settings(max_examples=60, deadline=None)
def test_any_list(sizes, seed, inv_scale, bad):
    generator = torch.Generator().manual_seed(seed)
    grads = []
    for size in sizes:
        dtype = DTYPES[int(torch.randint(len(DTYPES), (), generator=generator))]
        grads.append((torch.randn(size, generator=generator) * 1e3).to(dtype))
    if bad is None or bad[0] >= len(grads) or bad[1] >= sizes[bad[0]]:
        check(grads, inv_scale)
        return
    grads[bad[0]][bad[1]] = math.nan
    counts = torch.zeros(len(grads), 2, dtype=torch.int64)
    assert run(grads, inv_scale, counts=counts)[0] == 1.0
    assert counts.nonzero().tolist() == [[bad[0], 1]]


@devices
def test_opcheck(device):
    half, flag = torch.tensor(0.5, device=device), torch.zeros(1, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grads in ([], [torch.randn(4, 6, device=device)[:, ::2], torch.ones(5, device=device)]):
        torch.library.opcheck(norm_, (grads, half, flag, total))
        outputs = {
            "non_finite_counts": torch.zeros(len(grads), 2, dtype=torch.int64, device=device),
            "max_norm": 1.0,
            "clip_coef": torch.zeros((), device=device),
            "total_norm": torch.zeros(1, device=device),
        }
        torch.library.opcheck(norm_, (grads, half, flag, total), outputs)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors(device):
    with FakeTensorMode():
        grads = [torch.empty(3, device=device), torch.empty(2, device=device).half()]
        flag, total = torch.zeros((), device=device), torch.zeros(1, device=device).double()
        assert norm_(grads, torch.ones((), device=device), flag, total) is None


def test_grad_mode_makes_no_node():
    leaf = torch.ones(4, 4, requires_grad=True)
    strided = (leaf * 2)[:, ::2]
    assert run([leaf, strided]) == (0.0, 16.0 + 32.0)
    assert leaf.grad_fn is None


REFUSED = {
    "double gradient": (
        {"grads": [torch.ones(2), torch.ones(2).double()]},
        TypeError,
        r"expected grads\[1\] to be Half, BFloat16 or Float, got Double",
    ),
    "sparse gradient": (
        {"grads": [torch.ones(2, 2).to_sparse()]},
        ValueError,
        r"expected grads\[0\] to be strided, got layout Sparse",
    ),
    "meta gradient": (
        {"grads": [torch.ones(2, device="meta")]},
        ValueError,
        r"expected grads\[0\] on cpu, the device of inv_scale, got meta",
    ),
    "float sum": (
        {"sum_of_squares": torch.zeros(())},
        TypeError,
        "expected sum_of_squares to be Double, got Float",
    ),
    "two sums": (
        {"sum_of_squares": torch.zeros(2).double()},
        ValueError,
        "expected sum_of_squares to have one element, got 2",
    ),
    "integer flag": (
        {"found_inf": torch.zeros((), dtype=torch.int32)},
        TypeError,
        "expected found_inf to be Float, got Int",
    ),
    "counts of another length": (
        {"non_finite_counts": torch.zeros(3, 2, dtype=torch.int64)},
        ValueError,
        r"non_finite_counts to be contiguous of shape \[1, 2\], got shape \[3, 2\]",
    ),
    "counts that are strided": (
        {"non_finite_counts": torch.zeros(1, 4, dtype=torch.int64)[:, ::2]},
        ValueError,
        r"non_finite_counts to be contiguous of shape \[1, 2\]",
    ),
    "float counts": (
        {"non_finite_counts": torch.zeros(1, 2)},
        TypeError,
        "expected non_finite_counts to be Long, got Float",
    ),
    "meta counts": (
        {"non_finite_counts": torch.zeros(1, 2, dtype=torch.int64, device="meta")},
        ValueError,
        "expected non_finite_counts on cpu, got meta",
    ),
    "bound without coefficient": (
        {"max_norm": 1.0},
        ValueError,
        "expected max_norm and clip_coef together, got max_norm alone",
    ),
    "coefficient without bound": (
        {"clip_coef": torch.zeros(())},
        ValueError,
        "expected max_norm and clip_coef together, got clip_coef alone",
    ),
    "double coefficient": (
        {"max_norm": 1.0, "clip_coef": torch.zeros((), dtype=torch.float64)},
        TypeError,
        "expected clip_coef to be Float, got Double",
    ),
    "two norms": (
        {"total_norm": torch.zeros(2)},
        ValueError,
        "expected total_norm to have one element, got 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls_change_nothing(case):
    changes, error, message = REFUSED[case]
    arguments = {
        "grads": [torch.tensor([math.inf])],
        "inv_scale": torch.ones(()),
        "found_inf": torch.zeros(()),
        "sum_of_squares": torch.zeros((), dtype=torch.float64),
    } | changes
    with pytest.raises(error, match="norm_and_check_: .*" + message):
        norm_(**arguments)
    for name in ("found_inf", "sum_of_squares", "non_finite_counts", "clip_coef", "total_norm"):
        out = arguments.get(name)
        if out is not None and not out.is_meta:
            assert not out.any()
            assert out._version == 0


@devices
@dtypes
@pytest.mark.parametrize("before", [0.0, 1.0, 7.0, math.nan])
def test_a_flag_is_raised_or_overwritten_as_asked(device, dtype, before):
    for numel in (0, 1, 6000):
        good = [random(numel, dtype, device)]
        kept, _ = run(good, before=before)
        assert kept == before or math.isnan(before)
        assert run(good, before=before, overwrite_found_inf=True)[0] == 0.0
    bad = [random(numel, dtype, device) for numel in (5, 6000)]
    bad[1][-1] = math.inf
    for overwrites in (False, True):
        assert run(bad, before=before, overwrite_found_inf=overwrites)[0] == 1.0
