# SPDX-License-Identifier: Apache-2.0
"""State dictionaries, pickles and copies, both ways between torch's scaler and fastamp's."""

import copy
import io
import itertools
import pickle

import pytest
import torch

import fastamp
from support.scaler_pairs import SCALERS, outcome, snapshot


def used(kind, **options):
    scaler = kind("cpu", 8.0, 4.0, 0.25, 5, **options)
    scaler.scale(torch.ones(()))
    for overflow in (0.0, 0.0, 1.0, 0.0, 0.0):
        flag = torch.tensor(overflow)
        scaler._per_optimizer_states[0]["found_inf_per_device"] = {flag.device: flag}
        scaler.update()
    return scaler


def advance(scaler, overflow):
    scaler.scale(torch.ones(()))
    flag = torch.tensor(float(overflow))
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {flag.device: flag}
    scaler.update()
    return scaler.state_dict()


@pytest.mark.parametrize(("source", "target"), list(itertools.product(SCALERS, SCALERS)))
@pytest.mark.parametrize("started", [False, True])
def test_state_goes_from_each_kind_to_each_kind(source, target, started):
    original = used(source)
    loaded = target("cpu")
    if started:
        loaded.scale(torch.ones(()))
    buffer = io.BytesIO()
    torch.save(original.state_dict(), buffer)
    buffer.seek(0)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    assert loaded.state_dict() == original.state_dict()
    for overflow in (0, 0, 0, 1, 0):
        assert advance(loaded, overflow) == advance(original, overflow)


def test_state_has_exactly_torchs_keys_and_types():
    states = [used(kind).state_dict() for kind in SCALERS]
    assert states[0] == states[1]
    assert list(states[0]) == list(states[1])
    assert [type(v) for v in states[0].values()] == [type(v) for v in states[1].values()]


def test_an_instance_has_exactly_torchs_attributes():
    assert list(vars(used(SCALERS[0]))) == list(vars(used(SCALERS[1])))


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    "state",
    [
        {},
        {"scale": 1.0},
        {"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3},
        {"model": 1, "optimizer": 2},
        None,
        3,
        [("scale", 1.0)],
        {
            "scale": torch.tensor(4.0),
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 3,
            "_growth_tracker": torch.tensor(1),
        },
    ],
    ids=str,
)
def test_states_of_another_kind_are_refused_as_torch_does_and_change_nothing(state, started):
    results = []
    for kind in SCALERS:
        scaler = kind("cpu")
        if started:
            scaler.scale(torch.ones(()))
        before = snapshot(scaler)
        results.append(outcome(lambda s=scaler: s.load_state_dict(state)))
        if kind is fastamp.GradScaler and results[-1][0] == "raised":
            assert snapshot(scaler) == before
    assert results[0] == results[1]


@pytest.mark.parametrize("key", ["scale", "_growth_tracker", "growth_factor"])
def test_entries_that_are_no_numbers_are_refused(key):
    scaler = fastamp.GradScaler("cpu")
    before = snapshot(scaler)
    with pytest.raises(TypeError, match=f'load_state_dict: expected state_dict."{key}".*got str'):
        scaler.load_state_dict({**scaler.state_dict(), key: "many"})
    assert snapshot(scaler) == before


def test_pickle_round_trip_and_refusal_inside_an_iteration():
    for kind in SCALERS:
        scaler = used(kind)
        loaded = pickle.loads(pickle.dumps(scaler))
        assert type(loaded) is kind
        assert loaded._scale is None
        assert loaded.state_dict() == scaler.state_dict()
        assert advance(loaded, 0) == advance(scaler, 0)
        scaler._per_optimizer_states[1]["stage"] = None
        with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
            pickle.dumps(scaler)
    disabled = fastamp.GradScaler("cpu", enabled=False)
    assert not pickle.loads(pickle.dumps(disabled)).is_enabled()


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(SCALERS, 2)))
def test_the_pickled_state_of_each_kind_is_the_others(source, target):
    original = used(source)
    reborn = target.__new__(target)
    reborn.__setstate__(pickle.loads(pickle.dumps(original.__getstate__())))
    assert reborn.state_dict() == original.state_dict()
    for overflow in (0, 1, 0, 0):
        assert advance(reborn, overflow) == advance(original, overflow)


@pytest.mark.parametrize("options", [{}, {"hysteresis": 2, "min_scale": 1.0}])
def test_copies_are_independent(options):
    scaler = used(fastamp.GradScaler, **options)
    clone = copy.deepcopy(scaler)
    before = scaler.state_dict()
    assert clone.state_dict() == before
    advance(clone, 1)
    advance(clone, 1)
    assert scaler.state_dict() == before
    assert clone.get_scale() < scaler.get_scale()


def test_a_copied_scaler_shares_one_identity_inside_a_larger_copy():
    scaler = used(fastamp.GradScaler)
    first, second = copy.deepcopy([scaler, scaler])
    assert first is second
