# SPDX-License-Identifier: Apache-2.0
"""Moments in 8 bits: their bits, the length of steps, layouts, checkpoints, bad input."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastamp
import fastamp._C as _C
from fastamp._C import AmpStep
from support.amp_reference import DEVICES, assert_same_bits
from support.moment_codes_twin import FIRST, SECOND, decoded, encoded, noise

CODES = ("exp_avg_8", "exp_avg_sq_8", "moment_scales_8")
devices = pytest.mark.parametrize("device", DEVICES)


def adamw(params, **options):
    return fastamp.optim.AdamW(params, lr=0.01, **{"state_dtype": "8bit", **options})


def parameter(*shape, device="cpu", dtype=torch.float32):
    return torch.nn.Parameter(torch.randn(shape).to(device, dtype))


def uneven(*shape):
    """Gradients of very different sizes."""
    return torch.randn(*shape) * torch.randn(*shape).mul(1.5).exp()


def moments_of(optimizer, p):
    return _C.decode_moments(*(optimizer.state[p][key] for key in CODES))


def same_states(optimizer, other):
    own, torchs = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert own.keys() == torchs.keys()
    for number, state in own.items():
        assert state.keys() == torchs[number].keys()
        for key, value in state.items():
            assert_same_bits(value, torchs[number][key])


# --- bits ---


@pytest.mark.parametrize(("shape", "size"), [((32, 256), 128), ((48, 3, 64), 64), ((160, 32), 32)])
@pytest.mark.parametrize("beta1", [0.9, 0.95])
def test_codes_and_scales_are_those_of_a_twin_in_numpy(shape, size, beta1):
    """From the codes before: fp32 moments of torch's step, then codes by the noise of the step."""
    torch.manual_seed(0)
    first, p = parameter(5), parameter(*shape)
    optimizer = adamw([first, p], betas=(beta1, 0.99))
    for step in range(4):
        gradient = uneven(*shape)
        gradient[0] = 0
        gradient.view(-1)[step] = 1e-30
        before = [np.zeros(p.numel(), dtype=np.float32)] * 2
        if step:
            codes, scales = _numpy_state(optimizer, p)
            before = [
                decoded(c, s, bits, size)
                for c, s, bits in zip(codes, scales, (FIRST, SECOND), strict=True)
            ]
        twin = torch.nn.Parameter(p.detach().clone())
        reference = fastamp.optim.AdamW([twin], lr=0.01, betas=(beta1, 0.99))
        reference.state[twin] = {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.from_numpy(before[0]).reshape(shape).clone(),
            "exp_avg_sq": torch.from_numpy(before[1]).reshape(shape).clone(),
        }
        twin.grad = gradient.clone()
        p.grad = gradient.clone()
        reference.step()
        optimizer.step()
        assert_same_bits(p.detach(), twin.detach())
        codes, scales = _numpy_state(optimizer, p)
        for which, (key, bits) in enumerate((("exp_avg", FIRST), ("exp_avg_sq", SECOND))):
            exact = reference.state[twin][key].numpy()
            drawn = noise(1, step, p.numel(), bits) if which or beta1 > 0.9375 else None
            wanted_codes, wanted_scales = encoded(exact, bits, size, drawn)
            np.testing.assert_array_equal(scales[which], wanted_scales)
            np.testing.assert_array_equal(codes[which], wanted_codes)


def _numpy_state(optimizer, p):
    state = optimizer.state[p]
    codes = [state[key].numpy().reshape(-1) for key in CODES[:2]]
    scales = state[CODES[2]].numpy().reshape(-1, 2)
    return codes, [scales[:, 0], scales[:, 1]]


@devices
def test_threads_and_the_place_in_memory_change_no_bit(device):
    torch.manual_seed(0)
    start, gradient = torch.randn(512, 384), uneven(512, 384)
    results = []
    for threads, transposed in ((1, False), (2, False), (2, True)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            weight = start.to(device).clone()
            if transposed:
                weight = weight.t().contiguous().t()
            p = torch.nn.Parameter(weight)
            optimizer = adamw([p])
            for _ in range(3):
                p.grad = gradient.to(device)
                optimizer.step()
        finally:
            torch.set_num_threads(before)
        results.append([p.detach().contiguous(), *(optimizer.state[p][key] for key in CODES)])
    for other in results[1:]:
        for own, torchs in zip(results[0], other, strict=True):
            assert_same_bits(own, torchs)


@devices
def test_opcheck(device):
    p = torch.randn(64, 64, device=device)
    codes = [torch.randint(1, 100, (64, 64), device=device).byte() for _ in range(2)]
    arguments = (
        [p], [torch.randn_like(p)], [codes[0]], [codes[1]], [], [torch.zeros((), device=device)],
        [], [1], [0.1], [0.9], [0.99], [1e-8], [0.0], [True], [False], [False], [], [], [],
    )  # fmt: skip
    scales = torch.full((64, 1, 2), 100, device=device).byte()
    torch.library.opcheck(
        torch.ops.fastamp.fused_adamw_,
        arguments,
        {"noise_origins": [7], "moment_scales": [scales]},
    )


@devices
def test_a_skipped_step_changes_nothing(device):
    p = parameter(64, 64, device=device)
    optimizer = adamw([p])
    for found_inf in (0.0, 1.0):
        p.grad = torch.ones_like(p)
        before = [p.detach().clone(), *(v.clone() for v in optimizer.state[p].values())]
        optimizer._fastamp_pending_amp_step = AmpStep(
            found_inf=torch.tensor(found_inf, device=device)
        )
        optimizer.step()
    for own, torchs in zip([p.detach(), *optimizer.state[p].values()], before, strict=True):
        assert_same_bits(own, torchs)
    assert optimizer.state[p]["step"] == 1


def test_bad_gradients_make_a_group_nan_and_no_other():
    p = parameter(64, 64)
    optimizer = adamw([p])
    p.grad = torch.ones_like(p)
    p.grad[3, 5] = float("inf")
    optimizer.step()
    first, second = moments_of(optimizer, p)
    assert first[3].isnan().all()
    assert second[3].isnan().all()
    assert first[torch.arange(64) != 3].isfinite().all()


# --- lengths of steps ---


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sigma=st.floats(0, 12),
    scale=st.floats(-30, 3),
    zeros=st.floats(0, 1),
    beta1=st.sampled_from([0.0, 0.5, 0.9, 0.93, 0.95, 0.99]),
)
def test_no_step_is_longer_than_that_of_the_same_moments_in_float32(
    seed, sigma, scale, zeros, beta1
):
    """Whatever stands beside an element in its group."""
    numbers = torch.Generator().manual_seed(seed)
    spread = torch.randn(64, 128, generator=numbers).mul(sigma).add(scale).clamp(-80, 40).exp()
    second = spread.square().clamp(max=1e30)
    second[torch.rand(64, 128, generator=numbers) < zeros] = 0
    first = torch.randn(64, 128, generator=numbers) * second.sqrt()
    codes = _C.encode_moments(first, second, 128)
    # What is decoded: the next step's starting point, by nearest and by noise.
    p = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = adamw([p], betas=(beta1, 0.999), weight_decay=0)
    optimizer.state[p] = {
        "step": torch.tensor(9.0),
        **dict(zip(CODES, codes, strict=True)),
    }
    exact_first, exact_second = _C.decode_moments(*codes)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    stored_first, stored_second = moments_of(optimizer, p)
    wanted_first = exact_first.double() * beta1
    wanted_second = exact_second.double() * 0.999
    longest = 1.2 if beta1 > 0.9375 else 1.13
    for got, wanted in ((stored_first, wanted_first),):
        assert (got.abs() <= 1.125 * wanted.abs() + 1e-37).all()
    # Never 0 unless the moment was.
    assert ((stored_second > 0) == (wanted_second.float() > 0)).all()
    moves = wanted_first.abs() > 1e-36
    stored = stored_first.double().abs()[moves] / stored_second.double().sqrt()[moves]
    exact = wanted_first.abs()[moves] / wanted_second.sqrt()[moves]
    # float32's last bits, and second moments at the least code of all.
    keep = wanted_second[moves] > 1e-36
    assert (stored[keep] <= longest * exact[keep] * (1 + 1e-6)).all()


def test_second_moments_follow_gradients_that_fall():
    """The median of second moments over float32's, after gradients fell tenfold."""
    torch.manual_seed(0)
    own, torchs = parameter(64, 128), parameter(64, 128)
    optimizer = adamw([own])
    reference = fastamp.optim.AdamW([torchs], lr=0.01)
    for step in range(3000):
        gradient = torch.randn(64, 128) * (1.0 if step < 1000 else 0.1)
        own.grad, torchs.grad = gradient, gradient.clone()
        optimizer.step()
        reference.step()
    second = moments_of(optimizer, own)[1]
    exact = reference.state[torchs]["exp_avg_sq"]
    assert float((second / exact).mean()) == pytest.approx(1, abs=0.02)
    # They wander about the mean, most after a fall: their noise is of the moments that were.
    assert float((second / exact).std()) < 0.5
    assert 1 <= float((exact / second).sqrt().mean()) < 1.1


# --- layouts ---


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((32, 128), 128),
        ((4096, 64), 64),
        ((128, 96), 32),
        ((64, 3, 64), 64),
        ((31, 128), 0),  # small
        ((4096,), 0),  # a vector
        ((300, 33), 0),  # odd rows
        ((), 0),
        ((0, 128), 0),
    ],
)
def test_which_parameters_have_codes(shape, size):
    assert _C.moment_group(shape) == size
    p = parameter(*shape)
    optimizer = adamw([p])
    p.grad = torch.randn_like(p)
    optimizer.step()
    state = optimizer.state[p]
    if size:
        assert state["moment_scales_8"].shape == (shape[0], p[0].numel() // size, 2)
        assert {state[key].dtype for key in CODES} == {torch.uint8}
        assert "exp_avg" not in state
    else:
        assert state["exp_avg"].dtype is torch.bfloat16
        assert CODES[0] not in state


def test_state_takes_little_more_than_two_bytes_for_each_parameter():
    p = parameter(512, 512)
    optimizer = adamw([p])
    p.grad = torch.randn_like(p)
    optimizer.step()
    kept = sum(v.numel() * v.element_size() for v in optimizer.state[p].values())
    assert kept / p.numel() < 2.02


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16, "amsgrad"])
def test_a_layout_that_changes_in_between_is_converted(other):
    torch.manual_seed(0)
    p = parameter(64, 64)
    optimizer = adamw([p])
    (group,) = optimizer.param_groups
    for _ in range(3):
        p.grad = uneven(64, 64)
        optimizer.step()
    before = moments_of(optimizer, p)
    p.grad = torch.zeros_like(p)
    if other == "amsgrad":
        group["amsgrad"] = True
    else:
        group["state_dtype"] = other
    optimizer.step()
    state = optimizer.state[p]
    assert CODES[0] not in state
    dtype = torch.bfloat16 if other == "amsgrad" else other
    assert state["exp_avg"].dtype is dtype
    torch.testing.assert_close(state["exp_avg"].float(), 0.9 * before[0], rtol=1e-2, atol=0)
    group["amsgrad"], group["state_dtype"] = False, "8bit"
    optimizer.step()
    assert "exp_avg" not in state
    assert "max_exp_avg_sq" not in state
    torch.testing.assert_close(moments_of(optimizer, p)[0], 0.81 * before[0], rtol=0.15, atol=1e-6)


@pytest.mark.parametrize("master", ["float32", "remainder"])
def test_beside_masters_and_copies_the_weights_are_those_of_float32_parameters(master):
    torch.manual_seed(0)
    narrow = parameter(64, 64, dtype=torch.bfloat16)
    wide = torch.nn.Parameter(narrow.detach().float())
    own, torchs = adamw([narrow], master=master), adamw([wide], autocast_dtype=torch.bfloat16)
    for _ in range(5):
        gradient = uneven(64, 64).bfloat16()
        narrow.grad, wide.grad = gradient, gradient.float()
        own.step()
        torchs.step()
    assert_same_bits(narrow.detach(), wide.detach().bfloat16())
    for key in CODES:
        assert_same_bits(own.state[narrow][key], torchs.state[wide][key])


# --- checkpoints ---


def trained(optimizer_of, steps, p):
    optimizer = optimizer_of([p])
    for step in range(steps):
        torch.manual_seed(step)
        p.grad = uneven(*p.shape).to(p.dtype)
        optimizer.step()
    return optimizer


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(dtype):
    torch.manual_seed(0)
    p = parameter(64, 64, dtype=dtype)
    optimizer = trained(adamw, 3, p)
    q = copy.deepcopy(p)
    resumed = adamw([q])
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for step in range(3):
        torch.manual_seed(100 + step)
        p.grad = uneven(64, 64).to(dtype)
        q.grad = p.grad.clone()
        optimizer.step()
        resumed.step()
    assert_same_bits(p.detach(), q.detach())
    same_states(optimizer, resumed)


def test_a_portable_state_is_torchs():
    p = parameter(64, 64)
    optimizer = trained(adamw, 3, p)
    torchs = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone())], lr=0.01)
    state = optimizer.state_dict(portable=True)
    assert state["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    torchs.load_state_dict(through_a_file(state))
    (q,) = torchs.param_groups[0]["params"]
    for own, name in zip(moments_of(optimizer, p), ("exp_avg", "exp_avg_sq"), strict=True):
        assert_same_bits(torchs.state[q][name], own)
    q.grad = torch.randn_like(q)
    torchs.step()


def test_codes_are_no_moments_of_torchs():
    p = parameter(64, 64)
    optimizer = trained(adamw, 1, p)
    q = torch.nn.Parameter(torch.zeros(64, 64))
    torchs = torch.optim.AdamW([q])
    torchs.load_state_dict(optimizer.state_dict())
    q.grad = torch.ones_like(q)
    with pytest.raises(KeyError, match="exp_avg"):
        torchs.step()


@pytest.mark.parametrize("source", [torch.optim.AdamW, fastamp.optim.AdamW])
def test_moments_of_a_checkpoint_become_codes(source):
    p = parameter(64, 64)
    saved = trained(lambda params: source(params, lr=0.01), 3, p).state_dict()
    q = torch.nn.Parameter(p.detach().clone())
    optimizer = adamw([q])
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["state_dtype"] = "8bit"
    q.grad = torch.zeros_like(q)
    optimizer.step()
    first, second = moments_of(optimizer, q)
    state = saved["state"][0]
    torch.testing.assert_close(first, 0.9 * state["exp_avg"], rtol=0.14, atol=1e-3)
    torch.testing.assert_close(second, 0.999 * state["exp_avg_sq"], rtol=0.2, atol=1e-6)


# --- bad input ---


def test_words_that_are_no_layout_are_refused():
    p = parameter(3, 3)
    with pytest.raises(ValueError, match=r"AdamW?: expected state_dtype to be None.*or '8bit'"):
        adamw([p], state_dtype="4bit")
    with pytest.raises(ValueError, match=r"SGD: expected state_dtype to be None, torch\.float32"):
        fastamp.optim.SGD([p], lr=0.1, momentum=0.9, state_dtype="8bit")
    optimizer = adamw([p])
    with pytest.raises(ValueError, match="add_param_group: expected state_dtype"):
        optimizer.add_param_group({"params": [parameter(2)], "state_dtype": "8-bit"})
    assert len(optimizer.param_groups) == 1


OF_GROUPS = r"moment_scales\[0\] contiguous"


def bad_states():
    def byte(*shape):
        return torch.zeros(shape, dtype=torch.uint8)

    codes, scales = byte(64, 64), byte(64, 1, 2)
    return {
        "of another shape": ((byte(64, 32), codes, scales), r"exp_avgs\[1\] of shape"),
        "scales of other groups": (
            (codes, codes, byte(64, 4, 2)),
            OF_GROUPS,
        ),
        "scales of other rows": ((codes, codes, byte(32, 2, 2)), OF_GROUPS),
    }


@pytest.mark.parametrize("case", bad_states())
def test_codes_that_do_not_fit_are_refused_and_nothing_is_changed(case):
    codes, message = bad_states()[case]
    p, other = parameter(64, 64), parameter(3)
    optimizer = adamw([other, p])
    p.grad, other.grad = torch.ones_like(p), torch.ones_like(other)
    optimizer.state[p] = {"step": torch.zeros(()), **dict(zip(CODES, codes, strict=True))}
    before = p.detach().clone(), other.detach().clone()
    with pytest.raises(ValueError, match="fused_adamw_: expected " + message):
        optimizer.step()
    assert torch.equal(p.detach(), before[0])
    assert torch.equal(other.detach(), before[1])


def test_conversions_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="encode_moments: expected a group of 32, 64 or 128"):
        _C.encode_moments(torch.zeros(4, 48), torch.zeros(4, 48), 32)
    with pytest.raises(ValueError, match="encode_moments: expected two tensors of one shape"):
        _C.encode_moments(torch.zeros(4, 64), torch.zeros(4, 32), 32)
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    with pytest.raises(TypeError, match="decode_moments: expected Byte"):
        _C.decode_moments(codes.float(), codes, codes)
    with pytest.raises(ValueError, match="decode_moments: expected codes of one shape"):
        _C.decode_moments(codes, codes, torch.zeros(3, 2, 2, dtype=torch.uint8))
