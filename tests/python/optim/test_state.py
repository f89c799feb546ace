# SPDX-License-Identifier: Apache-2.0
"""What the optimizers store, and that it goes both ways between fastamp and torch."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastamp
from support.amp_reference import DEVICES, assert_same_bits
from support.optim_state import OPTIONS, run, same_state, saved_and_loaded
from support.optim_twins import PAIRS, Twins, assert_same_parameters, copies, parameters

devices = pytest.mark.parametrize("device", DEVICES)
names = pytest.mark.parametrize("name", PAIRS)


@devices
@names
def test_layout_is_that_of_torchs_fused_optimizers(device, name):
    params = parameters(device=device)
    own, torchs = PAIRS[name]
    others = copies(params)
    mine, other = own(params, **OPTIONS[name]), torchs(others, **OPTIONS[name], fused=True)
    run(mine, 2)
    run(other, 2)
    for p, q in zip(params, others, strict=True):
        for key, value in other.state[q].items():
            got = mine.state[p][key]
            assert (got.dtype, got.shape, got.device) == (value.dtype, value.shape, value.device)
            assert got.stride() == value.stride()
        extra = {"momentum_steps"} if name == "SGD" else set()
        assert mine.state[p].keys() - other.state[q].keys() == extra


@devices
@names
@given(before=st.integers(0, 3), between=st.integers(0, 3), after=st.integers(1, 3))
@settings(max_examples=10, deadline=None)
def test_checkpoints_go_to_torch_and_back(device, name, before, between, after):
    """Steps by fastamp, torch and fastamp again equal fastamp's alone, within Adam's bits."""
    torch.manual_seed(before + 10 * between)
    own, torchs = PAIRS[name]
    alone = parameters(device=device)
    chain = copies(alone)
    run(own(alone, **OPTIONS[name]), before + between + after)
    first = own(chain, **OPTIONS[name])
    run(first, before)
    middle = torchs(chain, **OPTIONS[name])
    middle.load_state_dict(saved_and_loaded(first.state_dict()))
    run(middle, between, before)
    last = own(chain, **OPTIONS[name])
    last.load_state_dict(saved_and_loaded(middle.state_dict()))
    run(last, after, before + between)
    for p, q in zip(alone, chain, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16], ids=str)
def test_a_loaded_checkpoint_continues_bit_for_bit(name, dtype, state_dtype):
    torch.manual_seed(5)
    own = PAIRS[name][0]
    options = OPTIONS[name] | {"state_dtype": state_dtype}
    params = parameters(dtype=dtype)
    optimizer = own(params, **options)
    run(optimizer, 4)
    others = copies(params)
    resumed = own(others, **options)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    same_state(optimizer, resumed)
    run(optimizer, 4, 4)
    run(resumed, 4, 4)
    assert_same_parameters(params, others)
    same_state(optimizer, resumed)


@names
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_and_pickles_continue_bit_for_bit(name, way):
    own = PAIRS[name][0]
    params = parameters(dtype=torch.bfloat16)
    optimizer = own(params, **OPTIONS[name], state_dtype=torch.bfloat16)
    run(optimizer, 3)
    twin = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    assert type(twin) is type(optimizer)
    same_state(optimizer, twin)
    run(optimizer, 3, 3)
    others = run(twin, 3, 3)
    assert_same_parameters(params, others)
    same_state(optimizer, twin)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_step_counts_of_any_kind_are_brought_to_the_device_as_fp32(name):
    own, torchs = PAIRS[name]
    params = parameters()
    reference = torchs(params)
    run(reference, 3)
    for count in (3, 3.0, torch.tensor(3.0, dtype=torch.float64), torch.tensor(3)):
        state_dict = copy.deepcopy(reference.state_dict())
        for state in state_dict["state"].values():
            state["step"] = count
        optimizer = own(params)
        optimizer.load_state_dict(state_dict)
        for p in params:
            step = optimizer.state[p]["step"]
            assert (step.dtype, step.device, step.item()) == (torch.float32, p.device, 3.0)
        run(optimizer, 1)
        assert optimizer.state[params[0]]["step"].item() == 4.0


def test_empty_momentum_entries_of_old_checkpoints_start_at_the_first_step():
    params = parameters(((3,),))
    optimizer = fastamp.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)
    state_dict = optimizer.state_dict()
    state_dict["state"] = {0: {"momentum_buffer": None}}
    optimizer.load_state_dict(state_dict)
    run(optimizer, 1)
    assert_same_bits(optimizer.state[params[0]]["momentum_buffer"], params[0].grad)


def test_hooks_of_state_dicts_see_and_change_what_is_loaded():
    params = parameters(((3,),), dtype=torch.bfloat16)
    optimizer = fastamp.optim.AdamW(params)
    run(optimizer, 1)
    seen = []

    def before_save(opt):
        seen.append("before save")
        assert opt is optimizer

    def after_save(_, state_dict):
        return {**state_dict, "extra": 1}

    optimizer.register_state_dict_pre_hook(before_save)
    optimizer.register_state_dict_post_hook(after_save)
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    other = fastamp.optim.AdamW(copies(params))
    exact = saved["state"][0]["exp_avg"] + 2.0**-20

    def before_load(_, state_dict):
        state = {0: saved["state"][0] | {"exp_avg": exact}}
        return {**state_dict, "state": state}

    def after_load(opt):
        value = opt.state[opt.param_groups[0]["params"][0]]["exp_avg"]
        seen.append(torch.equal(value, exact))

    other.register_load_state_dict_pre_hook(before_load)
    other.register_load_state_dict_post_hook(after_load)
    other.load_state_dict(saved)
    assert seen == ["before save", True]
    assert len(other._optimizer_load_state_dict_pre_hooks) == 1


def test_a_refused_state_changes_nothing():
    params = parameters()
    optimizer = fastamp.optim.Adam(params)
    run(optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert all(
        torch.equal(before["state"][i][k], after["state"][i][k])
        for i in before["state"]
        for k in before["state"][i]
    )
    assert "_fastamp_source" not in optimizer.__dict__


@names
def test_unloaded_twins_stay_apart(name):
    """Loading leaves the other optimizer's own state alone, as far as torch's does."""
    torch.manual_seed(9)
    twins = Twins(name, [{"params": parameters(dtype=torch.float32)}], **OPTIONS[name])
    twins.set_gradients()
    twins.step()
    other = PAIRS[name][0](copies(twins.mine), **OPTIONS[name])
    other.load_state_dict(copy.deepcopy(twins.own.state_dict()))
    twins.set_gradients()
    twins.step()
    assert all(
        other.state[p].get("step", torch.tensor(1.0)).item() == 1.0
        for p in other.param_groups[0]["params"]
    )


@pytest.mark.parametrize(
    ("step", "got"),
    [
        (math.nan, "nan"),
        (-5, "-5"),
        (torch.tensor(-1.0), r"tensor\(-1\.\)"),
        (torch.tensor([math.nan]), r"tensor\(\[nan\]\)"),
        (2**63, "9223372036854775808"),
        pytest.param(10**5000, "an int of 16610 bits", id="5001 digits"),
    ],
)
def test_no_count_of_steps_is_refused_and_changes_nothing(step, got):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = fastamp.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = step
    with pytest.raises(
        ValueError, match=f"^load_state_dict: expected step of parameter 0 .* got {got}$"
    ):
        optimizer.load_state_dict(saved)
    assert optimizer.state[parameter]["step"].item() == 1


@pytest.mark.parametrize(
    "step", [0, True, 2**62, 1e30, math.inf, torch.tensor(3, dtype=torch.int32)]
)
def test_any_other_count_of_steps_is_taken_as_torch_takes_it(step):
    results = []
    for kind in (fastamp.optim.AdamW, torch.optim.AdamW):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([parameter], lr=0.1)
        parameter.grad = torch.ones(3)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["step"] = step
        optimizer.load_state_dict(saved)
        optimizer.step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results)
