# SPDX-License-Identifier: Apache-2.0
"""16-bit parameters with their masters, and moments in bf16."""

from __future__ import annotations

import warnings

import pytest
import torch

import fastamp
from support.amp_reference import DEVICES, assert_same_bits
from support.optim_state import MOMENTS, OPTIONS, give_gradients, run, saved_and_loaded
from support.optim_twins import PAIRS, copies, parameters

devices = pytest.mark.parametrize("device", DEVICES)
names = pytest.mark.parametrize("name", PAIRS)
narrow = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@names
@narrow
def test_16_bit_parameters_have_fp32_masters_and_moments(name, dtype):
    own = PAIRS[name][0]
    params = parameters(dtype=dtype)
    single = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer, reference = own(params, **OPTIONS[name]), own(single, **OPTIONS[name])
    for step in range(10):
        give_gradients(params, step)
        for p, q in zip(params, single, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
        for p, q in zip(params, single, strict=True):
            state = optimizer.state[p]
            assert_same_bits(state["master_param"], q.detach())
            assert_same_bits(p.detach(), state["master_param"].to(dtype))
            for key in MOMENTS[name]:
                assert_same_bits(state[key], reference.state[q][key])


@names
@narrow
def test_torchs_state_of_16_bit_parameters_is_widened(name, dtype):
    own, torchs = PAIRS[name]
    params = parameters(dtype=dtype)
    before = torchs(params, **OPTIONS[name])
    run(before, 3)
    optimizer = own(params, **OPTIONS[name])
    optimizer.load_state_dict(before.state_dict())
    for p in params:
        for key in MOMENTS[name]:
            assert_same_bits(optimizer.state[p][key], before.state[p][key].float())
        assert "master_param" not in optimizer.state[p]  # the weights may be loaded later
    run(optimizer, 1, 3)
    back = torchs(params, **OPTIONS[name])
    back.load_state_dict(optimizer.state_dict())
    for p in params:
        for key in MOMENTS[name]:
            assert_same_bits(back.state[p][key], optimizer.state[p][key].to(dtype))
    run(back, 1, 4)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16], ids=str)
def test_bf16_moments_of_fp32_parameters_load(name, state_dtype):
    """torch's fused Adam keeps moments in bf16 from 2.12 on if they were created so."""
    own, torchs = PAIRS[name]
    params = parameters()
    before = torchs(params, **OPTIONS[name])
    run(before, 2)
    for state in before.state.values():
        for key in MOMENTS[name]:
            state[key] = state[key].to(torch.bfloat16)
    optimizer = own(params, **OPTIONS[name], state_dtype=state_dtype)
    optimizer.load_state_dict(saved_and_loaded(before.state_dict()))
    for p in params:
        for key in MOMENTS[name]:
            wanted = before.state[p][key].to(state_dtype or torch.float32)
            assert_same_bits(optimizer.state[p][key], wanted)
    run(optimizer, 2, 2)


@names
def test_bf16_moments_follow_fp32_ones_within_their_rounding(name):
    torch.manual_seed(8)
    own = PAIRS[name][0]
    params = parameters()
    others = copies(params)
    narrow_state = own(params, **OPTIONS[name], state_dtype=torch.bfloat16)
    run(narrow_state, 20)
    run(own(others, **OPTIONS[name]), 20)
    for p, q in zip(params, others, strict=True):
        assert all(narrow_state.state[p][key].dtype == torch.bfloat16 for key in MOMENTS[name])
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0.05, atol=0.05)
        assert p.numel() == 0 or not torch.equal(p, q)


ADAMS = pytest.mark.parametrize("adam", [fastamp.optim.Adam, fastamp.optim.AdamW])


@ADAMS
def test_moments_rounded_to_nearest_with_a_beta2_above_099_warn_once_at_the_users_line(adam):
    first, second = parameters(((3,),)), parameters(((4,),))
    groups = [{"params": first}, {"params": second}]
    with pytest.warns(UserWarning, match=r"cannot follow betas\[1\] = 0\.999") as caught:
        optimizer = adam(groups, state_dtype=torch.bfloat16, state_rounding="nearest")
    (warning,) = caught
    assert str(warning.message).startswith(f"{adam.__name__}: state_dtype=torch.bfloat16")
    assert "state_rounding='stochastic', or betas[1] <= 0.99" in str(warning.message)
    assert warning.filename == __file__
    with pytest.warns(UserWarning, match="add_param_group: state_dtype=torch.bfloat16") as caught:
        optimizer.add_param_group({"params": parameters(((2,),))})
    (warning,) = caught
    assert warning.filename == __file__


@ADAMS
def test_a_group_with_bf16_moments_of_its_own_warns(adam):
    nearest = {"state_rounding": "nearest"}
    with pytest.warns(UserWarning, match="cannot follow") as caught:
        adam([{"params": parameters(((3,),)), "state_dtype": torch.bfloat16, **nearest}])
    assert len(caught) == 1
    betas = (torch.tensor(0.9), torch.tensor(0.995))
    with pytest.warns(UserWarning, match="cannot follow"):
        adam(parameters(), betas=betas, state_dtype=torch.bfloat16, **nearest)


@ADAMS
def test_bf16_moments_that_follow_warn_of_nothing(adam):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nearest = {"state_rounding": "nearest"}
        adam(parameters(), betas=(0.9, 0.99), state_dtype=torch.bfloat16, **nearest)
        optimizer = adam(parameters(), state_dtype=torch.float32)
        optimizer.add_param_group({"params": parameters()})
        optimizer.step()
        narrow = {"params": parameters(), "state_dtype": torch.bfloat16, "betas": (0.9, 0.95)}
        optimizer.add_param_group(narrow | nearest)
        adam(parameters())
        fastamp.optim.SGD(parameters(), momentum=0.999, state_dtype=torch.bfloat16)


def test_state_dtype_is_a_groups_own_and_survives_torchs_checkpoints():
    first, second = parameters(((3,),)), parameters(((4,),))
    groups = [{"params": first}, {"params": second, "state_dtype": torch.float32}]
    optimizer = fastamp.optim.AdamW(groups, state_dtype=torch.bfloat16)
    run(optimizer, 1)
    assert optimizer.state[first[0]]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[second[0]]["exp_avg"].dtype == torch.float32
    reference = torch.optim.AdamW([{"params": first}, {"params": second}])
    run(reference, 1)
    optimizer.load_state_dict(reference.state_dict())  # Its groups do not know the option.
    assert optimizer.state[first[0]]["exp_avg"].dtype == torch.bfloat16
    more = parameters(((2,),))
    optimizer.add_param_group({"params": more})
    run(optimizer, 1)
    assert optimizer.state[more[0]]["exp_avg"].dtype == torch.bfloat16


def test_state_dtype_is_no_key_of_groups_that_did_not_ask_for_it():
    optimizer = fastamp.optim.SGD(parameters(), momentum=0.9)
    assert "state_dtype" not in optimizer.param_groups[0]
    assert "state_dtype" not in optimizer.state_dict()["param_groups"][0]


@names
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, "bfloat16"])
def test_other_state_dtypes_are_refused(name, dtype):
    with pytest.raises(ValueError, match=f"{name}: expected state_dtype to be None, torch.float32"):
        PAIRS[name][0](parameters(), state_dtype=dtype)
    optimizer = PAIRS[name][0](parameters())
    with pytest.raises(ValueError, match="add_param_group: expected state_dtype"):
        optimizer.add_param_group({"params": parameters(), "state_dtype": dtype})
    assert len(optimizer.param_groups) == 1


def test_state_edited_by_hand_is_brought_into_the_layout():
    (p,) = parameters(((3,),), dtype=torch.float16)
    optimizer = fastamp.optim.AdamW([p])
    run(optimizer, 1)
    state = optimizer.state[p]
    state["exp_avg"] = state["exp_avg"].half()
    state["step"] = torch.tensor(1)
    run(optimizer, 1)
    assert (state["exp_avg"].dtype, state["step"].dtype) == (torch.float32, torch.float32)
    assert state["step"].item() == 2.0


EDITS = {
    "data": lambda p: p.data.clamp_(-0.25, 0.25),
    "in place": lambda p: p.detach().clamp_(-0.25, 0.25),
    "swapped": lambda p: setattr(p, "data", torch.full_like(p, 0.125)),
}


@devices
@names
@narrow
@pytest.mark.parametrize("edit", EDITS)
def test_parameters_written_between_steps_count(device, name, dtype, edit):
    """A master that did not follow would bring the old value back at the next step."""
    torch.manual_seed(11)
    params = parameters(dtype=dtype, device=device)
    single = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer, reference = (PAIRS[name][0](ps, **OPTIONS[name]) for ps in (params, single))
    for step in range(6):
        give_gradients(params, step)
        for p, q in zip(params, single, strict=True):
            q.grad = p.grad.float()
        if step % 2:
            for p, q in zip(params, single, strict=True):
                master = q.detach().clone()
                EDITS[edit](p)
                kept = master.to(dtype) == p.detach()
                with torch.no_grad():  # Elements that nobody has changed keep their low bits.
                    q.copy_(torch.where(kept, master, p.detach().float()))
        optimizer.step()
        reference.step()
        for p, q in zip(params, single, strict=True):
            assert_same_bits(optimizer.state[p]["master_param"], q.detach())
            assert_same_bits(p.detach(), q.detach().to(dtype))


@names
def test_weights_may_be_loaded_after_the_optimizer(name):
    torch.manual_seed(12)
    model = torch.nn.Linear(5, 3).bfloat16()
    optimizer = PAIRS[name][0](model.parameters(), **OPTIONS[name])
    run(optimizer, 3)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    saved = saved_and_loaded(optimizer.state_dict())
    run(optimizer, 2, 3)
    other = torch.nn.Linear(5, 3).bfloat16()
    resumed = PAIRS[name][0](other.parameters(), **OPTIONS[name])
    run(resumed, 1)
    resumed.load_state_dict(saved)
    other.load_state_dict(weights)
    run(resumed, 2, 3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())
