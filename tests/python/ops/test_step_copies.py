# SPDX-License-Identifier: Apache-2.0
"""Weight copies: 16-bit copies of fp32 parameters that the fused steps write and never read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from support.amp_reference import DEVICES, assert_same_bits
from support.fused_steps import FusedAdam, FusedSgd, sgd_

devices = pytest.mark.parametrize("device", DEVICES)
makes = pytest.mark.parametrize("make", [FusedSgd, FusedAdam])
# With the keywords that calls without moments in 8 bits have.
OPS = {FusedSgd: (sgd_, {}), FusedAdam: (torch.ops.fastamp.fused_adamw_, {"moment_scales": []})}
SIZES = (1, 3, 4, 7, 0, 1023, 1024, 1025, 2049)
GARBAGE = 12345.0


def model(make, device="cpu", sizes=SIZES, state_dtype=torch.float32):
    """Two groups of fp32 parameters with a bf16 one between them, and gradients."""
    params = [torch.randn(n, device=device) for n in (*sizes, *sizes)]
    half = len(sizes)
    params.insert(half, torch.randn(9, device=device).bfloat16())
    for p in params:
        p.grad = torch.randn_like(p) * 4
    groups = [
        {"params": params[: half + 1], "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        {"params": params[half + 1 :], "lr": 0.05, "amsgrad": True, "nesterov": False},
    ]
    return make(groups, state_dtype), params


def copies_of(params, dtypes):
    """(weight copies, copy_of): copies with nothing in them of some parameters."""
    pairs = [(i, d) for i, d in enumerate(dtypes) if d is not None]
    made = [torch.full_like(params[i], GARBAGE, dtype=d) for i, d in pairs]
    return made, [i for i, _ in pairs]


def all_copies(params, dtype):
    return copies_of(params, [dtype if p.dtype == torch.float32 else None for p in params])


def amp_step(device, flag=0.0):
    return {
        "inv_scale": torch.tensor(0.25, device=device),
        "clip_coef": torch.tensor(0.7, device=device),
        "found_inf": torch.tensor(flag, device=device),
    }


@devices
@makes
@given(data=st.data(), seed=st.integers(0, 2**31), write=st.booleans())
@settings(max_examples=15, deadline=None)
def test_parameters_step_as_without_and_weight_copies_are_their_casts(
    device, make, data, seed, write
):
    choices = [torch.float16, torch.bfloat16, None]
    state_dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    torch.manual_seed(seed)
    own, params = model(make, device, state_dtype=state_dtype)
    torch.manual_seed(seed)
    plain, others = model(make, device, state_dtype=state_dtype)
    dtypes = [
        data.draw(st.sampled_from(choices)) if p.dtype == torch.float32 else None for p in params
    ]
    weight_copies, copy_of = copies_of(params, dtypes)
    for _ in range(3):
        own.step(
            **amp_step(device), write_grads=write, weight_copies=weight_copies, copy_of=copy_of
        )
        plain.step(**amp_step(device), write_grads=write)
    for p, q in zip(params, others, strict=True):
        assert_same_bits(p, q)
        assert_same_bits(p.grad, q.grad)
    for weight_copy, i in zip(weight_copies, copy_of, strict=True):
        assert_same_bits(weight_copy, params[i].to(weight_copy.dtype))


@devices
@makes
@pytest.mark.parametrize("flag", [1.0, 2.0, math.nan])
def test_a_skipped_step_writes_no_weight_copy(device, make, flag):
    own, params = model(make, device)
    weight_copies, copy_of = all_copies(params, torch.bfloat16)
    before = [p.clone() for p in params]
    own.step(**amp_step(device, flag), weight_copies=weight_copies, copy_of=copy_of)
    assert all(s.eq(GARBAGE).all() for s in weight_copies)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


@devices
@makes
def test_edits_of_weights_win_and_edits_of_weight_copies_are_lost(device, make):
    torch.manual_seed(0)
    own, params = model(make, device)
    torch.manual_seed(0)
    plain, others = model(make, device)
    weight_copies, copy_of = all_copies(params, torch.float16)
    for round_ in range(3):
        own.step(weight_copies=weight_copies, copy_of=copy_of)
        plain.step()
        for p, q in zip(params, others, strict=True):
            assert_same_bits(p, q)
            p.data.add_(round_)
            q.data.add_(round_)
        for weight_copy in weight_copies:
            weight_copy.fill_(math.nan)
    own.step(weight_copies=weight_copies, copy_of=copy_of)
    assert all(
        torch.equal(s, params[i].half()) for s, i in zip(weight_copies, copy_of, strict=True)
    )


@devices
@makes
def test_layouts(device, make):
    channels_last = torch.randn(2, 3, 4, 4, device=device).to(memory_format=torch.channels_last)
    weights = {
        "transposed": torch.randn(8, 6, device=device).t(),
        "every second": torch.randn(8, 12, device=device)[:, ::2],
        "odd address": torch.randn(49, device=device)[1:].view(6, 8),
        "channels last": channels_last,
    }
    for name, weight in weights.items():
        for weight_copy in (
            torch.empty_like(weight, dtype=torch.bfloat16),
            torch.empty(weight.shape, dtype=torch.bfloat16, device=device),
            torch.empty(*weight.shape, 2, dtype=torch.bfloat16, device=device)[..., 0],
        ):
            p, q = weight.clone(), weight.clone()
            p.grad = torch.randn(weight.shape, device=device)
            q.grad = p.grad.clone()
            make([{"params": [p], "lr": 0.5}]).step(weight_copies=[weight_copy], copy_of=[0])
            make([{"params": [q], "lr": 0.5}]).step()
            assert torch.equal(p, q), name
            assert torch.equal(weight_copy, p.bfloat16()), name


@pytest.mark.parametrize("threads", [1, 2, 3])
@makes
def test_large_parameters_and_many_groups(make, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        params = [torch.randn(n) for n in (200_001, 70_000, *range(40))]
        for p in params:
            p.grad = torch.randn_like(p)
        weight_copies, copy_of = all_copies(params, torch.bfloat16)
        own = make([{"params": [p], "lr": 0.1} for p in params])
        own.step(weight_copies=weight_copies, copy_of=copy_of)
        for weight_copy, p in zip(weight_copies, params, strict=True):
            assert_same_bits(weight_copy, p.bfloat16())
    finally:
        torch.set_num_threads(before)


@devices
@makes
def test_as_a_dispatcher_op(device, make):
    op, none = OPS[make]
    own, params = model(make, device, sizes=(3, 5))
    weight_copies, copy_of = all_copies(params, torch.bfloat16)
    arguments = own.arguments((), weight_copies, copy_of)
    torch.library.opcheck(op, arguments, none)
    versions = [s._version for s in weight_copies]
    op(*arguments, **none)
    assert [s._version for s in weight_copies] == [v + 1 for v in versions]
    with FakeTensorMode():
        own, params = model(make, device, sizes=(3, 5))
        weight_copies, copy_of = all_copies(params, torch.bfloat16)
        assert op(*own.arguments((), weight_copies, copy_of), **none) is None


BF = torch.ones(3, dtype=torch.bfloat16)
REFUSED = {
    "no index": ([BF], [], ValueError, "expected 1 copy_of, one for each of weight_copies, got 0"),
    "an index too many": ([BF], [0, 1], ValueError, "expected 1 copy_of, .* got 2"),
    "too large": ([BF], [3], ValueError, r"ascending indices of params, less than 3, got \[3\]"),
    "negative": ([BF], [-1], ValueError, "ascending indices of params"),
    "twice": ([BF, BF], [0, 0], ValueError, r"ascending indices of params.* got \[0, 0\]"),
    "falling": ([BF, BF], [2, 0], ValueError, "ascending indices of params"),
    "of a 16-bit parameter": (
        [BF],
        [1],
        TypeError,
        r"expected params\[1\], which has a weight copy, to be Float, got BFloat16",
    ),
    "fp32": (
        [torch.ones(3)],
        [0],
        TypeError,
        r"expected weight_copies\[0\] to be Half, BFloat16 or Float8_e4m3fn, got Float",
    ),
    "another shape": (
        [BF[:2]],
        [0],
        ValueError,
        r"expected weight_copies\[0\] of shape \[3\].*\[2\]",
    ),
    "another device": ([BF.to("meta")], [0], ValueError, r"weight_copies\[0\] on cpu.* got meta"),
    "expanded": (
        [BF[:1].expand(3)],
        [0],
        ValueError,
        r"weight_copies\[0\] to have one memory location per element",
    ),
    "sparse": ([BF.to_sparse()], [0], ValueError, r"expected weight_copies\[0\] to be strided"),
}


@makes
@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls_change_nothing(make, case):
    op, none = OPS[make]
    weight_copies, copy_of, error, message = REFUSED[case]
    params = [torch.ones(3), torch.ones(3).bfloat16(), torch.ones(3)]
    for p in params:
        p.grad = torch.ones_like(p)
    own = make([{"params": params, "lr": 0.5}])
    with pytest.raises(error, match=f"{op._qualified_op_name.split('::')[1]}: .*" + message):
        op(*own.arguments((), weight_copies, copy_of), **none)
    assert all(p.eq(1.0).all() and p._version == 0 for p in params)
