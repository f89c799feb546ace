# SPDX-License-Identifier: Apache-2.0
"""Scalers and kept casts in a trace."""

from __future__ import annotations

import json

import pytest
import torch

import fastamp


def overflow_once(scaler: torch.amp.GradScaler) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def test_scalers_made_inside_are_reported_and_others_are_not():
    before = fastamp.GradScaler("cpu")
    with fastamp.debug.trace() as t:
        inside = fastamp.GradScaler("cpu", init_scale=8.0)
        off = fastamp.GradScaler("cpu", enabled=False)
        overflow_once(inside)
    after = fastamp.GradScaler("cpu")
    assert t._scalers == [inside, off]
    assert before not in t._scalers
    assert after not in t._scalers
    first, second = t.to_dict()["scalers"]
    assert (first["enabled"], first["scale"]) == (True, 4.0)
    assert second == {"enabled": False}
    lines = str(t).splitlines()
    assert lines[-2].startswith("Scaler 1: scale 4")
    assert lines[-1] == "Scaler 2: disabled"
    if hasattr(inside, "history"):
        assert first["skipped_steps"] == 1
        assert [step["skipped"] for step in first["history"]] == [False, True, False]
        assert lines[-2].endswith("1 of 3 steps skipped")
    json.loads(t.to_json(), parse_constant=pytest.fail)  # no NaN or Infinity


@pytest.mark.parametrize("make", [fastamp.GradScaler, torch.amp.GradScaler])
def test_a_scaler_made_before_can_be_given(make):
    scaler = make("cpu", init_scale=8.0)
    overflow_once(scaler)
    with fastamp.debug.trace(scaler=scaler) as t:
        pass
    assert t.to_dict()["scalers"][0]["scale"] == 4.0


def test_a_scaler_whose_arguments_were_refused_counts_as_disabled():
    with fastamp.debug.trace() as t, pytest.raises(AssertionError):
        fastamp.GradScaler("cpu", growth_factor=0.5)
    assert t.to_dict()["scalers"] == [{"enabled": False}]


def test_something_else_than_a_scaler_is_refused():
    with pytest.raises(TypeError, match="trace: expected scaler to be a GradScaler or None"):
        fastamp.debug.trace(scaler=3)


def test_kept_casts_are_reported():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    with fastamp.casts.keep(weight), fastamp.debug.trace() as t:
        with fastamp.autocast("cpu"):
            torch.mm(torch.ones(1, 4), weight)
        assert t.to_dict()["kept_casts"] == {"copies": 1, "bytes": 32}
