# SPDX-License-Identifier: Apache-2.0
"""unscale_and_check_ against a float64 reference and against torch's own op."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.amp_reference import (
    DEVICES,
    DTYPES,
    assert_same_bits,
    check_unscale,
    check_unscale_in_place,
    unscale_,
)

# Around nothing, one, the vector widths (4 to 16 elements), the CPU's block (1024), the CUDA chunk.
SIZES = (0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 1023, 1024, 1025, 2047, 2048, 2049, 6000)
FACTORS = (1.0, 0.5, 1 / 65536, 3.1, 1e-30, 70000.0, -2.0, 0.0)

devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(numel: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return (torch.randn(numel, dtype=torch.float64) * 1000).to(dtype).to(device)


@devices
@dtypes
@pytest.mark.parametrize("factor", FACTORS)
def test_every_size(device, dtype, factor):
    for numel in SIZES:
        check_unscale([random(numel, dtype, device)], factor)


@devices
@pytest.mark.parametrize("factor", FACTORS)
def test_mixed_dtypes_in_one_call(device, factor):
    check_unscale([random(n, d, device) for n in SIZES for d in DTYPES], factor)


@devices
@dtypes
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_non_finite_at_the_ends(device, dtype, bad, factor):
    sizes = (2049, 1, 17)
    for tensor in (0, 1, 2):
        for element in (0, -1):
            grads = [random(n, dtype, device) for n in sizes]
            grads[tensor][element] = bad
            check_unscale(grads, factor)


@devices
def test_flag_is_never_lowered(device):
    check_unscale([random(100, torch.float32, device)], 0.5, before=1.0)
    check_unscale([random(100, torch.float32, device)], 0.5, before=2.0)


@devices
@dtypes
@pytest.mark.parametrize("with_sum", [False, True])
def test_a_flag_without_a_value_gets_one(device, dtype, with_sum):
    inverse = torch.tensor(0.5, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device) if with_sum else None
    for bad in (None, math.inf, math.nan):
        for numel in (0, 1, 5000):
            grads = [random(3, dtype, device), random(numel, dtype, device)]
            if bad is not None:
                grads[1][-1:] = bad
            flag = torch.full((), 7.0, device=device)
            unscale_(grads, inverse, flag, sum_of_squares=total, overwrite_found_inf=True)
            assert flag.item() == (1.0 if bad is not None and numel > 0 else 0.0)


@devices
@dtypes
def test_special_values(device, dtype):
    info = torch.finfo(dtype)
    values = [0.0, -0.0, info.max, info.min, info.tiny, info.smallest_normal, info.eps, 1.0]
    values += [info.smallest_normal * info.eps, -info.smallest_normal * info.eps * 3]
    grad = torch.tensor(values * 3, dtype=torch.float64).to(dtype).to(device)
    for factor in (*FACTORS, 1e38, 1e-45):
        check_unscale([grad], factor)


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("numel", [40, 5000, 700_000])
def test_product_that_overflows_is_reported(device, dtype, extras, numel):
    # torch looks at the element before the multiplication only, and would step by inf.
    top = torch.finfo(dtype).max
    for where in (0, numel // 2, -1):
        for value, factor, overflows in (
            (top, 4.0, True),
            (top / 8, 4.0, False),
            (1.0, 1e30, None),
        ):
            grad = torch.ones(numel, dtype=dtype, device=device)
            grad[where] = value
            counts = torch.full((1, 2), 7, device=device)
            total = torch.zeros((), dtype=torch.float64, device=device)
            given = {"sum_of_squares": total, "non_finite_counts": counts} if extras else {}
            found_inf = torch.zeros((), device=device)
            unscale_([grad], torch.tensor(factor, device=device), found_inf, **given)
            lost = int(grad.isinf().sum())
            if overflows is not None:
                assert lost == overflows
            assert found_inf.item() == float(lost > 0)
            if extras:
                assert counts.tolist() == ([[lost, 0]] if lost else [[7, 7]])


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_largest_finite_products_are_not_reported(device, dtype):
    """Where rounding decides: halfway to what would be the next number, and just below."""
    top = torch.finfo(dtype).max
    grad = torch.tensor([1.0, 1.0], device=device).to(dtype)
    halfway = top * (1 + torch.finfo(dtype).eps / 4)
    for factor in (top, halfway) if dtype != torch.float32 else (top,):
        factor = torch.tensor(factor, dtype=torch.float64).float()
        for each in (factor, torch.nextafter(factor, torch.tensor(0.0))):
            mine, found_inf = grad.clone(), torch.zeros((), device=device)
            unscale_([mine], each.to(device), found_inf)
            assert found_inf.item() == float(bool(mine.isinf().any())), each


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [0.5, 3.1, 1 / 3, 1e-6])
def test_every_16_bit_pattern(dtype, factor):
    grad = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    check_unscale([grad], factor)
    finite = grad[grad.isfinite()]
    check_unscale([finite], factor)


@dtypes
@pytest.mark.parametrize("factor", FACTORS)
def test_equals_torch(dtype, factor):
    grads = [random(n, dtype) for n in SIZES]
    grads[5][0] = math.inf
    torchs = [g.clone() for g in grads]
    torchs_flag, own_flag = torch.zeros(1), torch.zeros(1)
    inv_scale = torch.tensor(factor)
    torch._amp_foreach_non_finite_check_and_unscale_(torchs, torchs_flag, inv_scale)
    unscale_(grads, inv_scale, own_flag)
    overflows = any(bool(their.isinf().any()) for their in torchs)  # torch does not look
    assert own_flag.item() == max(torchs_flag.item(), float(overflows))
    for mine, their in zip(grads, torchs, strict=True):
        assert_same_bits(mine, their)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_equals_torch_on_cuda(dtype):
    grads = [random(n, dtype, "cuda") for n in SIZES] * 120  # more than the argument tables hold
    grads = [g.clone() for g in grads]
    torchs = [g.clone() for g in grads]
    torchs_flag, own_flag = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    inv_scale = torch.tensor(3.1, device="cuda")
    torch._amp_foreach_non_finite_check_and_unscale_(torchs, torchs_flag, inv_scale)
    unscale_(grads, inv_scale, own_flag)
    assert torch.equal(torchs_flag, own_flag)
    for mine, their in zip(grads, torchs, strict=True):
        assert_same_bits(mine, their)


@devices
@dtypes
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_strides(device, dtype, factor):
    base = random(4096, dtype, device).view(16, 16, 16)
    views = {
        "transposed": base.transpose(0, 2),
        "channels last": random(2 * 3 * 4 * 5, dtype, device)
        .view(2, 3, 4, 5)
        .to(memory_format=torch.channels_last),
        "every second": base[:, :, ::2],
        "inner block": base[3:9, 2:5, 1:15],
        "one column": base[:, :, 3],
        "offset by one": random(4097, dtype, device)[1:],
        "size-one dimension": base[:, :1, :],
    }
    for name, view in views.items():
        whole = view._base if view._base is not None else view
        untouched = whole.clone()
        check_unscale_in_place([view], [view], factor)
        # What the view does not show is as it was.
        view.zero_()
        mask = torch.zeros_like(untouched, dtype=torch.bool)
        mask.as_strided(view.size(), view.stride(), view.storage_offset()).fill_(True)
        assert torch.equal(whole[~mask], untouched[~mask]), name


@devices
def test_strided_gradient_with_inf(device):
    whole = torch.ones(10, 10, device=device)
    whole[9, 8] = math.inf
    check_unscale_in_place([whole[:, ::2]], [whole[:, ::2]], 0.5)


@devices
def test_empty_list_and_empty_tensors(device):
    found_inf = torch.zeros((), device=device)
    unscale_([], torch.tensor(0.5, device=device), found_inf)
    check_unscale([torch.empty(0, 3, device=device), torch.empty(3, 0, 2, device=device)], 0.5)
    assert found_inf.item() == 0.0


@devices
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_any_shape_of_one_element_is_a_scalar(device, shape):
    grad, found_inf = torch.ones(3, device=device), torch.zeros(shape, device=device)
    unscale_([grad], torch.full(shape, 0.5, device=device), found_inf)
    assert grad.tolist() == [0.5] * 3
    assert found_inf.shape == shape


@devices
def test_many_small_tensors(device):
    grads = [torch.full((1 + i % 16,), float(i), device=device) for i in range(10_000)]
    check_unscale(grads, 0.25)
    grads[-1][-1] = math.nan
    check_unscale(grads, 0.25)


@given(
    sizes=st.lists(st.integers(0, 5000), max_size=12),
    dtype_seed=st.integers(0, 2**31),
    factor=st.floats(width=32, allow_nan=False, allow_infinity=False),
    bad=st.none() | st.tuples(st.integers(0, 11), st.integers(0, 4999)),
    threads=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=200, deadline=None)
def test_any_list(sizes, dtype_seed, factor, bad, threads):
    generator = torch.Generator().manual_seed(dtype_seed)
    grads = []
    for size in sizes:
        dtype = DTYPES[int(torch.randint(len(DTYPES), (), generator=generator))]
        grads.append((torch.randn(size, generator=generator) * 1e3).to(dtype))
    if bad is not None and bad[0] < len(grads) and bad[1] < sizes[bad[0]]:
        grads[bad[0]][bad[1]] = math.inf
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_unscale(grads, factor)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_tensors_on_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        grads = [random(n, d) for n in (300_001, 77, 131_072, 499_999) for d in DTYPES]
        check_unscale(grads, 1 / 3)
        grads[-1][-1] = math.inf
        check_unscale(grads, 1 / 3)
    finally:
        torch.set_num_threads(before)
