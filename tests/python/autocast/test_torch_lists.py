# SPDX-License-Identifier: Apache-2.0
"""Every case of torch's autocast test lists, under our kernels and under torch's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastamp
from support.autocast_state import cuda_state, torch_kernels
from support.torch_lists import Case, cpu_cases, cuda_cases, flatten, same

DTYPES = [torch.bfloat16, torch.float16]
CPU_CASES = [
    pytest.param(case, dtype, id=f"{str(dtype)[6:]}-{case.list_name}-{case.op}-{i}")
    for dtype in DTYPES
    for i, case in enumerate(cpu_cases(dtype))
]


def test_no_list_is_left_out():
    """Sizes of the lists in torch 2.11; a shorter list here would make the tests below say less."""
    counts = Counter(case.list_name for case in cpu_cases(torch.bfloat16))
    assert sum(counts.values()) == 55
    assert len(counts) == 7


def outcome(case: Case) -> Any:
    try:
        return case.call()
    except (RuntimeError, AttributeError, TypeError) as error:
        return type(error)


@pytest.mark.parametrize(("case", "dtype"), CPU_CASES)
def test_cpu_case_gives_torchs_dtype_and_bits(case: Case, dtype: torch.dtype):
    with torch_kernels(), torch.autocast("cpu", dtype=dtype):
        expected = outcome(case)
    with fastamp.autocast("cpu", dtype=dtype):
        got = outcome(case)
    with torch.autocast("cpu", dtype=dtype):
        under_torchs_region = outcome(case)
    assert isinstance(expected, type) == isinstance(got, type), (expected, got)
    if isinstance(expected, type):
        assert got is expected
        return
    assert same(got, expected)
    assert same(under_torchs_region, expected)
    for result in flatten(got):
        if isinstance(result, torch.Tensor):
            assert result.dtype == case.out


@pytest.mark.parametrize(("case", "dtype"), CPU_CASES)
def test_cpu_case_equals_the_casts_written_out_by_hand(case: Case, dtype: torch.dtype):
    if case.op == "__div__":
        pytest.skip("no such method since Python 3")
    with fastamp.autocast("cpu", dtype=dtype):
        got = case.call()[0]
        with fastamp.autocast("cpu", enabled=False):
            by_hand = case.call_by_hand()
    assert same(got, by_hand)


# -- the CUDA column -----------------------------------------------------------------------------


@pytest.fixture(params=DTYPES, ids=["bf16", "fp16"])
def fake_cuda_cases(request: pytest.FixtureRequest) -> Iterator[tuple[torch.dtype, list[Case]]]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield request.param, cuda_cases(request.param, torch.device("cuda:0"))


def dtypes_of(case: Case) -> Any:
    try:
        return [
            result.dtype if isinstance(result, torch.Tensor) else type(result)
            for result in flatten(case.call())
        ]
    except Exception as error:
        return type(error)


def test_cuda_case_gives_torchs_dtypes_on_fake_tensors(
    fake_cuda_cases: tuple[torch.dtype, list[Case]],
):
    dtype, cases = fake_cuda_cases
    with cuda_state(dtype):
        got = [dtypes_of(case) for case in cases]
    with torch_kernels(), cuda_state(dtype):
        expected = [dtypes_of(case) for case in cases]
    differing = [
        (case.list_name, case.op, e, g)
        for case, e, g in zip(cases, expected, got, strict=True)
        if e != g and not promotes_where_torch_refuses(case, e)
    ]
    assert not differing
    ran = [g for g in got if isinstance(g, list)]
    assert len(ran) > 0.8 * len(cases), Counter(str(g) for g in got if not isinstance(g, list))


def promotes_where_torch_refuses(case: Case, expected: Any) -> bool:
    """The lists hold float16 arguments; torch refuses them in a bfloat16 region."""
    return case.list_name == "torch_need_autocast_promote" and expected is RuntimeError


def test_cuda_case_has_the_dtype_its_list_promises(
    fake_cuda_cases: tuple[torch.dtype, list[Case]],
):
    dtype, cases = fake_cuda_cases
    wrong = []
    with cuda_state(dtype):
        for case in cases:
            got = dtypes_of(case)
            if isinstance(got, list) and case.out is not None:
                wrong += [(case.op, g) for g in got if isinstance(g, torch.dtype) and g != case.out]
    assert not wrong


def test_banned_op_is_refused_on_cuda_and_its_replacement_is_not(
    fake_cuda_cases: tuple[torch.dtype, list[Case]],
):
    dtype, _ = fake_cuda_cases
    x = torch.rand(4, 4, device="cuda:0", dtype=dtype)
    with cuda_state(dtype):
        with pytest.raises(RuntimeError, match="binary_cross_entropy"):
            torch.nn.functional.binary_cross_entropy(x, x)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(x, x)
    assert loss.dtype == torch.float32


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_cuda_case_gives_torchs_dtype_and_bits_on_a_gpu(dtype: torch.dtype):
    torch.manual_seed(0)
    cases = cuda_cases(dtype, torch.device("cuda:0"))
    wrong = []
    for case in cases:
        with torch_kernels(), torch.autocast("cuda", dtype=dtype):
            expected = outcome(case)
        with fastamp.autocast("cuda", dtype=dtype):
            got = outcome(case)
        if promotes_where_torch_refuses(case, expected):
            continue
        equal = got is expected if isinstance(expected, type) else same(got, expected)
        if not equal:
            wrong.append((case.list_name, case.op))
    assert not wrong


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_cudnn_rnn_gives_torchs_bits_and_gradients_on_a_gpu(kind: Any, dtype: torch.dtype):
    torch.manual_seed(0)
    model = kind(8, 16, num_layers=2, bidirectional=True).cuda()
    x = torch.randn(5, 3, 8, device="cuda", requires_grad=True)
    results = []
    for kernels in (torch_kernels(), nullcontext()):
        with kernels:
            with fastamp.autocast("cuda", dtype=dtype):
                out, hidden = model(x)
            grads = torch.autograd.grad(out.float().sum(), [x, *model.parameters()])
        results.append([out, list(flatten(hidden)), list(grads)])
    assert results[1][0].dtype == torch.float16  # as torch's, whatever the region's dtype
    assert same(results[0], results[1])
