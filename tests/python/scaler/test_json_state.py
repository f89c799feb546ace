# SPDX-License-Identifier: Apache-2.0
"""to_json, from_json, load_json: the state of a scaler as one line of JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastamp
from support.amp_reference import fp32
from support.scaler_pairs import snapshot

HEAD = {"format": "fastamp.GradScaler", "version": 1, "enabled": True}
FIVE = {
    "scale": 512.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "growth_tracker": 7,
}


def text_with(**entries: Any) -> str:
    return json.dumps({**HEAD, **FIVE, **entries})


def test_the_text_of_a_new_scaler():
    assert fastamp.GradScaler("cpu").to_json() == (
        '{"format": "fastamp.GradScaler", "version": 1, "enabled": true, "scale": 65536.0, '
        '"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "growth_tracker": 0}'
    )


def test_the_text_has_the_options_that_are_in_use():
    scaler = fastamp.GradScaler(
        "cpu", min_scale=1.0, max_scale=2.0**24, hysteresis=2, fast_growth_interval=16
    )
    assert json.loads(scaler.to_json()) == {
        **HEAD,
        **FIVE,
        "scale": 65536.0,
        "growth_tracker": 0,
        "min_scale": 1.0,
        "max_scale": 16777216.0,
        "hysteresis": 2,
        "hysteresis_tracker": 2,
        "fast_growth_interval": 16,
        "fast_growth_limit": None,
    }


@settings(max_examples=100, deadline=None)
@given(
    scale=st.floats(width=32, allow_nan=False, allow_infinity=False),
    growth=st.floats(1.0, 1e300, exclude_min=True),
    backoff=st.floats(-1e300, 1.0, exclude_max=True),
    interval=st.integers(0, 2**31 - 1),
    tracker=st.integers(0, 2**31 - 1),
    hysteresis=st.integers(1, 2**31 - 1),
    limit=st.floats(width=32, allow_nan=False).filter(lambda value: value != -math.inf),
)
def test_numbers_come_back_without_loss(
    scale, growth, backoff, interval, tracker, hysteresis, limit
):
    state = {
        "scale": scale,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
        "_growth_tracker": tracker,
        "min_scale": 1e-40,
        "hysteresis": hysteresis,
        "fast_growth_interval": 3,
        "_fast_growth_limit": limit,
    }
    if hysteresis > 1:
        state["_hysteresis_tracker"] = hysteresis - 1
    else:
        del state["hysteresis"]
    scaler = fastamp.GradScaler("cpu")
    scaler.load_state_dict(state)
    text = scaler.to_json()
    for same in (text, json.dumps(json.loads(text), indent=2, sort_keys=True)):
        back = fastamp.GradScaler.from_json(same, "cpu")
        assert repr(sorted(back.state_dict().items())) == repr(sorted(state.items()))
    assert fp32(json.loads(text)["scale"]) == scale


def test_a_run_goes_on_where_it_was():
    scaler = fastamp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, hysteresis=2)
    scaler.scale(torch.ones(()))

    def advance(each: Any, overflow: int) -> None:
        flag = torch.tensor(float(overflow))
        each._per_optimizer_states[0]["found_inf_per_device"] = {flag.device: flag}
        each.update()

    for overflow in (0, 0, 0, 1, 1, 0, 1):
        advance(scaler, overflow)
    back = fastamp.GradScaler.from_json(scaler.to_json(), "cpu")
    back.scale(torch.ones(()))
    assert back.state_dict() == scaler.state_dict()
    for overflow in (1, 0, 0, 0, 1, 1, 1):
        advance(scaler, overflow)
        advance(back, overflow)
        assert back.to_json() == scaler.to_json()


def test_from_json_takes_the_constructors_arguments_and_the_class():
    class Mine(fastamp.GradScaler):
        pass

    scaler = Mine.from_json(text_with(), "cpu", keep_scaled_grads=True, min_scale=2.0)
    assert type(scaler) is Mine
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"], state["min_scale"]) == (512.0, 7, 2.0)
    assert scaler._keep_scaled_grads


def test_a_disabled_scaler():
    scaler = fastamp.GradScaler("cpu", enabled=False)
    text = scaler.to_json()
    assert json.loads(text) == {**HEAD, "enabled": False}
    assert not fastamp.GradScaler.from_json(text, "cpu").is_enabled()
    scaler.load_json(text_with())  # Nothing to load into.
    assert scaler.to_json() == text
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        fastamp.GradScaler("cpu").load_json(text)


def test_integers_and_other_spellings_of_numbers_are_read():
    text = text_with().replace("512.0", "5.12e+2").replace("2.0", "2")
    assert fastamp.GradScaler.from_json(f"\n\t{text} \r\n", "cpu").get_scale() == 512.0


def without(key: str) -> str:
    entries = {**HEAD, **FIVE}
    del entries[key]
    return json.dumps(entries)


REFUSED = {
    "nothing": ("", "one JSON object, got none"),
    "a list": ("[]", "one JSON object, got a list"),
    "half": (text_with()[:-1], "one JSON object, got none"),
    "more": (text_with() + "}", "one JSON object, got none"),
    "no colon": ('{"format" 1}', "one JSON object, got none"),
    "a comma too many": (text_with()[:-1] + ",}", "one JSON object, got none"),
    "an open string": ('{"format', "one JSON object, got none"),
    "an escape": (r'{"form\u0061t": "x"}', '"format" to be "fastamp.GradScaler", got "x"'),
    "no value": ('{"format": }', "one JSON object, got none"),
    "a key twice": (text_with()[:-1] + ', "scale": 1.0}', 'each key once, got "scale" twice'),
    "another format": (text_with(format="x"), '"format" to be "fastamp.GradScaler", got "x"'),
    "format a number": (text_with(format=1), '"format" to be a string, got a number'),
    "another version": (text_with(version=2), '"version" to be 1, got 2'),
    "version a string": (text_with(version="1"), '"version" to be an integer, got a string'),
    "enabled a number": (text_with(enabled=1), '"enabled" to be a bool, got a number'),
    "an unknown key": (text_with(scales=1.0), 'no other key, got "scales"'),
    "a disabled scale": (text_with(enabled=False), "no other key"),
    "scale a string": (text_with(scale="512"), '"scale" to be a number, got a string'),
    "scale null": (text_with(scale=None), '"scale" to be a number, got null'),
    "scale a list": (text_with(scale=[1]), '"scale" to be a number, got a list'),
    "scale NaN": (text_with(scale=math.nan), "a number, a string, true, false or null, got NaN"),
    "scale infinite": (text_with(scale=math.inf), "true, false or null, got Infinity"),
    "scale beyond fp32": (text_with(scale=1e39), "scale to be finite in float32, got 1e"),
    "scale halfway": (text_with(scale=(2 - 2.0**-24) * 2.0**127), "scale to be finite in float32"),
    "scale beyond fp64": (text_with().replace("512.0", "1e999"), '"scale" in the range of float64'),
    "scale +1": (text_with().replace("512.0", "+1"), "one JSON object, got none"),
    "scale .5": (text_with().replace("512.0", ".5"), "one JSON object, got none"),
    "scale 1.": (text_with().replace("512.0", "1."), "one JSON object, got none"),
    "scale 01": (text_with().replace("512.0", "01"), "one JSON object, got none"),
    "scale 0x1": (text_with().replace("512.0", "0x1"), "one JSON object, got none"),
    "scale 1e": (text_with().replace("512.0", "1e"), "one JSON object, got none"),
    "tracker a fraction": (text_with(growth_tracker=0.5), '"growth_tracker" to be an integer'),
    "tracker negative": (text_with(growth_tracker=-1), "0 <= growth_tracker"),
    "tracker too large": (text_with(growth_tracker=2**31), "growth_tracker < 2.31"),
    "interval huge": (text_with(growth_interval=2**64), '"growth_interval" to be an integer of 64'),
    "growth 1": (text_with(growth_factor=1.0), "growth_factor > 1.0, got 1"),
    "backoff 1": (text_with(backoff_factor=1), "backoff_factor < 1.0, got 1"),
    "min 0": (text_with(min_scale=0), "finite min_scale > 0"),
    "min over max": (text_with(min_scale=4, max_scale=2), "max_scale >= min_scale"),
    "hysteresis 0": (text_with(hysteresis=0), "1 <= hysteresis"),
    "fast growth 0": (text_with(fast_growth_interval=0), "1 <= fast_growth_interval"),
    "limit a string": (text_with(fast_growth_limit="inf"), '"fast_growth_limit" to be a number'),
    "limit too large": (text_with(fast_growth_limit=1e39), "fast_growth_limit to be inf or in"),
    **{f"no {key}": (without(key), f'object with "{key}"') for key in (*HEAD, *FIVE)},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_another_text_is_refused_and_changes_nothing(case):
    text, message = REFUSED[case]
    scaler = fastamp.GradScaler("cpu", init_scale=8.0, history_size=4)
    scaler.scale(torch.ones(()))
    before = snapshot(scaler)
    with pytest.raises(ValueError, match=f"from_json: expected .*{message}") as raised:
        scaler.load_json(text)
    assert str(raised.value).count("from_json: ") == 1
    with pytest.raises(ValueError, match="from_json: expected "):
        fastamp.GradScaler.from_json(text, "cpu")
    assert snapshot(scaler) == before


def test_a_text_that_is_no_string_is_refused():
    scaler = fastamp.GradScaler("cpu")
    with pytest.raises(TypeError, match="load_json: expected text to be a str, got bytes"):
        scaler.load_json(b"{}")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="from_json: expected text to be a str, got dict"):
        fastamp.GradScaler.from_json({}, "cpu")  # type: ignore[arg-type]


def test_a_scale_that_is_not_a_number_is_not_written():
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.update(torch.tensor(math.nan))
    with pytest.raises(ValueError, match="to_json: expected scale to be finite in float32, got"):
        scaler.to_json()
