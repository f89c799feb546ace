# SPDX-License-Identifier: Apache-2.0
"""What torch.amp does not have: min_scale, max_scale, hysteresis."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastamp
from support.scaler_pairs import snapshot


def advance(scaler, overflow):
    flag = torch.tensor(float(overflow))
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {flag.device: flag}
    scaler.update()


def started(*args, **options):
    scaler = fastamp.GradScaler("cpu", *args, **options)
    scaler.scale(torch.ones(()))
    return scaler


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"min_scale": 0.0}, ValueError, "finite min_scale > 0, got 0.0"),
        ({"min_scale": -1.0}, ValueError, "finite min_scale > 0, got -1.0"),
        ({"min_scale": float("nan")}, ValueError, "finite min_scale"),
        ({"max_scale": float("inf")}, ValueError, "finite max_scale"),
        (
            {"min_scale": 4.0, "max_scale": 2.0},
            ValueError,
            r"max_scale >= min_scale \(4.0\), got 2",
        ),
        ({"min_scale": 2.0**20}, ValueError, "init_scale >= min_scale"),
        ({"max_scale": 2.0}, ValueError, r"init_scale <= max_scale \(2.0\), got 65536.0"),
        ({"min_scale": "1"}, TypeError, "min_scale to be a float or None, got str"),
        ({"max_scale": True}, TypeError, "max_scale to be a float or None, got bool"),
        ({"hysteresis": 0}, ValueError, "1 <= hysteresis"),
        ({"hysteresis": 2**31}, ValueError, "1 <= hysteresis"),
        ({"hysteresis": 2.0}, TypeError, "hysteresis to be an int, got float"),
        ({"hysteresis": True}, TypeError, "hysteresis to be an int, got bool"),
        ({"hysteresis": None}, TypeError, "hysteresis to be an int, got NoneType"),
    ],
)
def test_options_out_of_range_are_refused(options, error, text):
    with pytest.raises(error, match=f"GradScaler: expected.*{text}"):
        fastamp.GradScaler("cpu", **options)


def test_extras_are_keyword_only():
    with pytest.raises(TypeError):
        fastamp.GradScaler("cpu", 2.0, 2.0, 0.5, 3, True, 1.0)


@settings(max_examples=100, deadline=None)
@given(
    history=st.lists(st.booleans(), max_size=30),
    hysteresis=st.integers(1, 4),
    interval=st.integers(1, 3),
    low=st.sampled_from([None, 4.0, 16.0]),
    high=st.sampled_from([None, 16.0, 64.0]),
)
def test_the_scale_follows_a_plain_model(history, hysteresis, interval, low, high):
    scaler = started(
        16.0, growth_interval=interval, min_scale=low, max_scale=high, hysteresis=hysteresis
    )
    scale, clean, patience = 16.0, 0, hysteresis
    for overflow in history:
        if overflow:
            clean, patience = 0, max(patience - 1, 0)
            scale *= 0.5 if patience == 0 else 1.0
        else:
            clean, patience = clean + 1, hysteresis
            if clean == interval:
                scale, clean = scale * 2.0, 0
        scale = max(scale, low or 0.0)
        scale = min(scale, high or float("inf"))
        advance(scaler, overflow)
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (scale, clean)


def test_a_new_scale_outside_the_bounds_is_refused_and_changes_nothing():
    scaler = started(8.0, min_scale=2.0, max_scale=32.0)
    scaler._per_optimizer_states[0]["stage"] = None
    before = snapshot(scaler)
    for value in (1.0, 64.0, float("nan")):
        with pytest.raises(ValueError, match=r"update: expected new_scale [<>]= m.._scale"):
            scaler.update(value)
        assert snapshot(scaler) == before
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0


def test_a_tensor_outside_the_bounds_is_brought_back_at_the_next_update():
    scaler = started(8.0, min_scale=2.0)
    scaler.update(torch.tensor(0.5))
    advance(scaler, 0)
    assert scaler.get_scale() == 2.0


def test_extras_are_in_the_state_only_when_in_use_and_torch_still_loads_it():
    scaler = started(8.0, min_scale=2.0, max_scale=64.0, hysteresis=3)
    advance(scaler, 1)
    state = scaler.state_dict()
    extras = {"min_scale": 2.0, "max_scale": 64.0, "hysteresis": 3, "_hysteresis_tracker": 2}
    assert {k: state[k] for k in state if k in extras} == extras
    reference = torch.amp.GradScaler("cpu")
    reference.load_state_dict(state)
    assert reference.state_dict() == {k: v for k, v in state.items() if k not in extras}


@pytest.mark.parametrize("tracker", [-1, 2**31, 10**400, 1.0, True, None])
def test_a_tracker_that_no_scaler_has_is_refused_and_changes_nothing(tracker):
    scaler = started(8.0, hysteresis=3)
    before = scaler.state_dict()
    state = {**before, "scale": 4.0, "_hysteresis_tracker": tracker}
    with pytest.raises(ValueError, match=r"_hysteresis_tracker.* to be an int >= 0 and"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("begun", [False, True])
def test_extras_come_back_from_state_and_pickle(begun):
    scaler = started(8.0, min_scale=2.0, max_scale=64.0, hysteresis=3)
    advance(scaler, 1)
    fresh = fastamp.GradScaler("cpu")
    if begun:
        fresh.scale(torch.ones(()))
    fresh.load_state_dict(scaler.state_dict())
    unpickled = pickle.loads(pickle.dumps(scaler))
    for copy in (fresh, unpickled):
        copy.scale(torch.ones(()))
        assert copy.state_dict() == scaler.state_dict()
    for overflow in (1, 1, 0, 1):
        for each in (scaler, fresh, unpickled):
            advance(each, overflow)
        assert fresh.state_dict() == unpickled.state_dict() == scaler.state_dict()


def test_a_state_without_extras_keeps_those_of_the_scaler():
    scaler = started(8.0, min_scale=2.0, hysteresis=2)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", 4.0).state_dict())
    state = scaler.state_dict()
    assert (state["scale"], state["min_scale"], state["hysteresis"]) == (4.0, 2.0, 2)


@pytest.mark.parametrize(
    "entry", [{"hysteresis": 0}, {"min_scale": -1.0}, {"hysteresis": 2, "_hysteresis_tracker": "x"}]
)
def test_a_state_with_bad_extras_changes_nothing(entry):
    scaler = started(8.0)
    before = snapshot(scaler)
    with pytest.raises(ValueError, match="load_state_dict: expected"):
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0, **entry})
    assert snapshot(scaler) == before
