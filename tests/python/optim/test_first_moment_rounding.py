# SPDX-License-Identifier: Apache-2.0
"""bfloat16 first moments and momentum: they follow gradients, with any factor; noise elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch

import fastamp
from fastamp._C import AmpStep
from support.amp_reference import assert_same_bits
from support.optim_state import give_gradients, run, same_state, saved_and_loaded
from support.optim_twins import copies, parameters
from support.rounding_twin import rounded

NARROW = torch.bfloat16


def adamw(params, factor, **options):
    betas = (factor, 0.999)
    return fastamp.optim.AdamW(params, lr=1e-3, betas=betas, state_dtype=NARROW, **options)


def sgd(params, factor, **options):
    return fastamp.optim.SGD(params, lr=1e-3, momentum=factor, state_dtype=NARROW, **options)


def muon(params, factor, **options):
    return fastamp.optim.Muon(params, lr=1e-3, momentum=factor, state_dtype=NARROW, **options)


KINDS = {
    "AdamW": (adamw, "exp_avg"),
    "SGD": (sgd, "momentum_buffer"),
    "Muon": (muon, "momentum_buffer"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def narrow_moment(optimizer, p):
    for key in ("exp_avg", "momentum_buffer"):
        if key in optimizer.state[p]:
            assert optimizer.state[p][key].dtype is NARROW
            return optimizer.state[p][key]
    raise AssertionError("no first moment")


def constant(optimizer, p, size, steps):
    p.grad = torch.full_like(p, size)
    for _ in range(steps):
        optimizer.step()
    return narrow_moment(optimizer, p).float().mean().item()


@kinds
@pytest.mark.parametrize("factor", [0.96, 0.99, 0.995, 0.998, 0.999])
def test_moments_follow_steady_gradients_and_let_them_go(kind, factor):
    """To nearest, they stand still short of the gradients, and above where these have gone."""
    p = torch.nn.Parameter(torch.zeros(2, 512))  # Few products for Muon.
    optimizer = KINDS[kind][0]([p], factor)
    grown = constant(optimizer, p, 1.0, 2000)
    exact = 1 - factor**2000
    if kind == "SGD":  # The buffer is the sum.
        exact /= 1 - factor
    assert grown == pytest.approx(exact, rel=0.02)
    fallen = constant(optimizer, p, 0.0, 1000)
    assert fallen == pytest.approx(exact * factor**1000, rel=0.05, abs=1e-4 * exact)


@pytest.mark.parametrize("factor", [0.5, 0.9, 0.9375])
@kinds
def test_with_factors_that_move_far_they_are_rounded_to_nearest(kind, factor):
    torch.manual_seed(0)
    make, key = KINDS[kind]
    p = torch.nn.Parameter(torch.randn(16, 32))
    (q,) = copies([p])
    narrow, wide = make([p], factor), make([q], factor)
    wide.param_groups[0]["state_dtype"] = torch.float32
    for step in range(3):
        give_gradients([p], step)
        q.grad = p.grad.clone()
        if step > 0:
            wide.state[q][key].copy_(narrow.state[p][key])
        narrow.step()
        wide.step()
        assert_same_bits(narrow.state[p][key], wide.state[q][key].to(NARROW))


@kinds
def test_bits_are_those_of_a_twin_in_numpy(kind):
    """The upper half of the noise: second moments take the lower one."""
    torch.manual_seed(1)
    make, key = KINDS[kind]
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (40, 50))]
    twins = copies(params)
    narrow, wide = make(params, 0.99), make(twins, 0.99)
    wide.param_groups[0]["state_dtype"] = torch.float32
    run(narrow, 1)
    run(wide, 1)
    for step in range(1, 4):
        for p, q in zip(params, twins, strict=True):
            wide.state[q][key].copy_(narrow.state[p][key])
        run(narrow, 1, step)
        run(wide, 1, step)
        for number, (p, q) in enumerate(zip(params, twins, strict=True)):
            expected = rounded(wide.state[q][key], number, step, upper=True)
            assert_same_bits(narrow.state[p][key], expected)
            assert number == 0 or not torch.equal(expected, wide.state[q][key].to(NARROW))


def test_nearest_is_the_rounding_of_torch_for_first_moments_too():
    torch.manual_seed(2)
    (p,) = parameters(((40, 50),))
    (q,) = copies([p])
    with pytest.warns(UserWarning, match=r"cannot follow betas\[0\] = 0\.995"):
        narrow = fastamp.optim.AdamW(
            [p], betas=(0.995, 0.99), state_dtype=NARROW, state_rounding="nearest"
        )
    wide = fastamp.optim.AdamW([q], betas=(0.995, 0.99))
    run(narrow, 1)
    run(wide, 1)
    assert_same_bits(narrow.state[p]["exp_avg"], wide.state[q]["exp_avg"].to(NARROW))


@kinds
@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
def test_a_resumed_run_continues_bit_for_bit(kind, how):
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(24, 30))]
    make = KINDS[kind][0]
    whole = make(params, 0.999)
    run(whole, 3)
    if how == "deepcopy":
        resumed = copy.deepcopy(whole)
    else:
        resumed = make(copies(params), 0.999)
        resumed.load_state_dict(saved_and_loaded(whole.state_dict()))
    run(whole, 3, 3)
    run(resumed, 3, 3)
    same_state(whole, resumed)


@kinds
def test_a_skipped_step_draws_nothing(kind):
    torch.manual_seed(4)
    params = [torch.nn.Parameter(torch.randn(24, 30))]
    others = copies(params)
    make = KINDS[kind][0]
    skipping, plain = make(params, 0.999), make(others, 0.999)
    run(skipping, 2)
    run(plain, 2)
    give_gradients(params, 77)
    skipping._fastamp_pending_amp_step = AmpStep(found_inf=torch.ones(()))
    skipping.step()
    run(skipping, 2, 2)
    run(plain, 2, 2)
    same_state(skipping, plain)


def test_muon_counts_steps_for_narrow_buffers_only():
    p = torch.nn.Parameter(torch.randn(4, 6))
    optimizer = muon([p], 0.95)
    (group,) = optimizer.param_groups
    run(optimizer, 2)
    assert optimizer.state[p]["momentum_steps"] == 2
    group["state_dtype"] = torch.float32
    run(optimizer, 1)
    assert list(optimizer.state[p]) == ["momentum_buffer"]
    group["state_dtype"] = NARROW
    run(optimizer, 1)
    assert optimizer.state[p]["momentum_steps"] == 2
    torchs = torch.optim.Muon(copies([p]))
    torchs.load_state_dict(optimizer.state_dict())
    portable = optimizer.state_dict(portable=True)["state"][0]
    assert list(portable) == ["momentum_buffer"]
    assert portable["momentum_buffer"].dtype is torch.float32


# --- the noise is an element's own ---

FORMATS = {
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "columns": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "exchanged": lambda t: t.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["AdamW", "amsgrad", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_formats_change_no_bit(form, kind, dtype):
    torch.manual_seed(5)
    weights = torch.randn(6, 5, 3, 7).to(dtype)
    optimizers = []
    for layout in (lambda t: t, FORMATS[form]):
        p = torch.nn.Parameter(layout(weights.clone()))
        options = {"amsgrad": True} if kind == "amsgrad" else {}
        make = sgd if kind == "SGD" else adamw
        optimizers.append(make([p], 0.99, **options))
    for optimizer in optimizers:
        for step in range(4):
            (p,) = optimizer.param_groups[0]["params"]
            generator = torch.Generator().manual_seed(step)
            p.grad = torch.randn(weights.shape, generator=generator).to(dtype)
            if step % 2 == 0:  # As a backward pass would leave it, or another.
                p.grad = torch.empty_like(p).copy_(p.grad)
            optimizer.step()
    (p,), (q,) = (optimizer.param_groups[0]["params"] for optimizer in optimizers)
    assert p.stride() != q.stride()
    assert_same_bits(p.detach(), q.detach())
    same_state(*optimizers)


def test_codes_of_8_bits_have_the_noise_of_their_elements_too():
    torch.manual_seed(7)
    weights = torch.randn(32, 8, 4, 4)
    optimizers = []
    for form in (torch.contiguous_format, torch.channels_last):
        p = torch.nn.Parameter(weights.clone(memory_format=form))
        optimizers.append(fastamp.optim.AdamW([p], betas=(0.99, 0.999), state_dtype="8bit"))
        run(optimizers[-1], 3)
        assert "exp_avg_8" in optimizers[-1].state[p]
    same_state(*optimizers)


def test_a_transposed_matrix_has_the_noise_of_its_elements():
    torch.manual_seed(6)
    weights = torch.randn(24, 40)
    params = [torch.nn.Parameter(weights.clone()), torch.nn.Parameter(weights.t().contiguous().t())]
    states = []
    for p in params:
        optimizer = muon([p], 0.99)
        run(optimizer, 3)
        states.append(optimizer.state[p]["momentum_buffer"])
    assert_same_bits(*states)


# --- beyond 2^24 steps ---


def at_many_steps(make, steps=2.0**24, **options):
    p = torch.nn.Parameter(torch.zeros(2, 512))
    optimizer = make([p], 0.999, **options)
    p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state[p]
    state["momentum_steps" if "momentum_steps" in state else "step"].fill_(steps)
    return p, optimizer


@kinds
@pytest.mark.parametrize("steps", [2.0**24 - 3, 2.0**24, 2.0**25, 3.0 * 2**24])
def test_noise_goes_on_beyond_steps_that_float32_counts(kind, steps):
    p, optimizer = at_many_steps(KINDS[kind][0], steps)
    constant(optimizer, p, 1.0, 999)
    fallen = constant(optimizer, p, 0.0, 3000)
    exact = (1 - 0.999**1000) * 0.999**3000 * (1000 if kind == "SGD" else 1)
    assert fallen == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("state_dtype", [NARROW, "8bit"])
def test_second_moments_do_not_stand_still_either(state_dtype):
    p = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = fastamp.optim.AdamW([p], state_dtype=state_dtype)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.state[p]["step"].fill_(2.0**24)
    for size in (1.0, 0.0):
        p.grad.fill_(size)
        counts = set()
        for _ in range(2000):
            optimizer.step()
            counts.add(optimizer.state[p]["step"].item())
        assert len(counts) == 2000
    (state,) = optimizer.state_dict(portable=True)["state"].values()
    exact = (1 - 0.999**2001) * 0.999**2000
    assert state["exp_avg_sq"].mean().item() == pytest.approx(exact, rel=0.1)
