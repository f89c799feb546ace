# SPDX-License-Identifier: Apache-2.0
"""fast_growth_interval: a scale that fell is back in tens of steps."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastamp
from support.scale_model import ScaleModel
from support.scaler_pairs import snapshot
from support.scaler_steps import INF, model_and_optimizer, step


def advance(scaler: Any, overflow: object) -> None:
    flag = torch.tensor(float(bool(overflow)))
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {flag.device: flag}
    scaler.update()


def started(scale: float = 65536.0, **options: Any) -> fastamp.GradScaler:
    scaler = fastamp.GradScaler("cpu", scale, **options)
    scaler.scale(torch.ones(()))
    return scaler


def steps_until(scaler: fastamp.GradScaler, scale: float) -> int:
    for count in range(1, 100_000):
        advance(scaler, False)
        if scaler.get_scale() >= scale:
            return count
    raise AssertionError(scaler.get_scale())


@settings(max_examples=200, deadline=None)
@given(
    history=st.lists(st.sampled_from([0, 0, 0, 0, 1]), max_size=120),
    growth=st.sampled_from([2.0, 1.3, 4.0]),
    backoff=st.sampled_from([0.5, 0.7]),
    interval=st.integers(0, 12),
    fast=st.none() | st.integers(1, 5),
    hysteresis=st.integers(1, 3),
    bounds=st.sampled_from([(None, None), (4.0, None), (None, 64.0), (4.0, 64.0)]),
)
def test_the_scale_follows_an_independent_model(
    history, growth, backoff, interval, fast, hysteresis, bounds
):
    low, high = bounds
    rules = {
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
        "hysteresis": hysteresis,
        "min_scale": low,
        "max_scale": high,
        "fast_growth_interval": fast,
    }
    scaler, model = started(16.0, **rules), ScaleModel(16.0, **rules)
    for overflow in history:
        advance(scaler, overflow)
        model.step(bool(overflow))
        assert scaler.get_scale() == model.scale
        assert scaler._get_growth_tracker() == model.clean
        if fast is not None:
            assert scaler.state_dict()["_fast_growth_limit"] == model.limit


def test_a_collapse_is_over_in_tens_of_steps():
    usual, fast = started(), started(fast_growth_interval=10)
    for scaler in (usual, fast):
        for _ in range(11):  # The first 65536 -> 32768, the rest to 32.
            advance(scaler, True)
        assert scaler.get_scale() == 32.0
    assert steps_until(usual, 32768.0) == 10 * 2000
    assert steps_until(fast, 32768.0) == 10 * 10
    # From there on it is the usual interval: 65536 is what overflowed.
    assert steps_until(fast, 65536.0) == 2000


def test_growth_is_fast_until_the_first_fall_and_then_usual():
    scaler = started(1024.0, growth_interval=50, fast_growth_interval=2)
    assert steps_until(scaler, 2.0**20) == 2 * 10
    advance(scaler, True)
    assert scaler.get_scale() == 2.0**19
    assert steps_until(scaler, 2.0**20) == 50


def test_a_limit_that_has_fallen_for_good_is_tried_once():
    scaler = started(2.0**16, growth_interval=1000, fast_growth_interval=5)
    skipped = 0
    for _ in range(400):  # From now on only scales up to 2^8 are finite.
        overflow = scaler.get_scale() > 2.0**8
        skipped += overflow
        advance(scaler, overflow)
    assert scaler.get_scale() == 2.0**8
    assert skipped == 8 + 1


def test_another_scale_below_the_limit_grows_fast_though_the_count_is_past_the_interval():
    scaler = started(64.0, growth_interval=1000, fast_growth_interval=3)
    advance(scaler, True)
    for _ in range(10):
        advance(scaler, False)
    assert scaler.get_scale() == 32.0
    scaler.update(4.0)
    assert steps_until(scaler, 8.0) == 1  # 11 clean steps are more than 3.
    assert steps_until(scaler, 32.0) == 6


@pytest.mark.parametrize("begun", [False, True])
def test_the_limit_comes_back_from_state_pickle_copy_and_json(begun):
    scaler = started(1024.0, growth_interval=9, fast_growth_interval=2)
    for _ in range(3):
        advance(scaler, True)
    state = scaler.state_dict()
    assert (state["fast_growth_interval"], state["_fast_growth_limit"]) == (2, -512.0)
    fresh = fastamp.GradScaler("cpu")
    if begun:
        fresh.scale(torch.ones(()))
    fresh.load_state_dict(state)
    copies = [
        scaler,
        fresh,
        pickle.loads(pickle.dumps(scaler)),
        copy.deepcopy(scaler),
        fastamp.GradScaler.from_json(scaler.to_json(), "cpu"),
    ]
    for each in copies:
        each.scale(torch.ones(()))
    for overflow in (0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0):
        for each in copies:
            advance(each, overflow)
            assert each.state_dict() == scaler.state_dict() or each is scaler
    assert all(each.state_dict() == scaler.state_dict() for each in copies)


def test_states_are_exchanged_with_torch():
    scaler = started(8.0, fast_growth_interval=2)
    assert scaler.state_dict()["_fast_growth_limit"] == math.inf
    reference = torch.amp.GradScaler("cpu")
    reference.load_state_dict(scaler.state_dict())
    assert reference.state_dict()["scale"] == 8.0
    advance(scaler, True)
    scaler.load_state_dict(reference.state_dict())
    state = scaler.state_dict()
    # torch does not know where the scale was good: that is found out again.
    assert (state["scale"], state["fast_growth_interval"], state["_fast_growth_limit"]) == (
        8.0,
        2,
        math.inf,
    )


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0, ValueError, r"1 <= fast_growth_interval < 2\*\*31, got 0"),
        (2**31, ValueError, "got 2147483648"),
        (2.0, TypeError, "fast_growth_interval to be an int, got float"),
        (True, TypeError, "fast_growth_interval to be an int, got bool"),
    ],
)
def test_intervals_out_of_range_are_refused(value, error, text):
    with pytest.raises(error, match=f"GradScaler: expected .*{text}"):
        fastamp.GradScaler("cpu", fast_growth_interval=value)


@pytest.mark.parametrize(
    "entry",
    [
        {"fast_growth_interval": 0},
        {"fast_growth_interval": 2, "_fast_growth_limit": math.nan},
        {"fast_growth_interval": 2, "_fast_growth_limit": 1e39},
        {"fast_growth_interval": 2, "_fast_growth_limit": 10**400},
        {"fast_growth_interval": 2, "_fast_growth_limit": "inf"},
        {"fast_growth_interval": 2, "_fast_growth_limit": True},
    ],
)
def test_a_state_with_a_bad_limit_changes_nothing(entry):
    scaler = started(8.0)
    before = snapshot(scaler)
    with pytest.raises(ValueError, match="load_state_dict: expected"):
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0, **entry})
    assert snapshot(scaler) == before


def test_steps_with_an_amp_step_and_history_see_it():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=64.0, fast_growth_interval=2)
    for bad in (None, {"0.bias": [INF]}, {"0.bias": [INF]}, None, None, None):
        step(scaler, model, optimizer, bad)
    assert [row.scale for row in scaler.history()] == [64.0, 64.0, 32.0, 16.0, 16.0, 32.0]
    assert [row.growth_tracker for row in scaler.history()] == [1, 0, 0, 1, 0, 1]
