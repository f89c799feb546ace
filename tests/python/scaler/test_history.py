# SPDX-License-Identifier: Apache-2.0
"""The history of a scaler: what it has, and how it goes with the state."""

import copy
import io
import math
import pickle

import pytest
import torch

import fastamp
from support.scaler_pairs import SCALERS
from support.scaler_steps import INF, NAN, model_and_optimizer, step


def test_history_has_what_happened_and_only_so_much_of_it():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=8.0, growth_interval=2, history_size=3)
    assert scaler.history() == []
    expected = []
    count = sum(p.numel() for p in model.parameters())
    for number, bad in enumerate((None, None, {"0.bias": [INF]}, None, {"1.bias": [NAN]})):
        before = scaler.get_scale()
        step(scaler, model, optimizer, bad)
        norm = math.sqrt(count) / before if bad is None else None
        tracker = scaler.state_dict()["_growth_tracker"]
        expected.append((number, before, bad is not None, norm, tracker))
        rows = scaler.history()
        assert len(rows) == min(number + 1, 3)
        for row, (index, scale, skipped, norm, tracker) in zip(rows, expected[-3:], strict=True):
            assert (row.step, row.scale, row.skipped) == (index, scale, skipped)
            assert row.growth_tracker == tracker
            if norm is None:
                assert not math.isfinite(row.norm)
            else:
                assert row.norm == pytest.approx(norm, rel=1e-6)


def test_the_norm_in_the_history_is_over_all_optimizers():
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in (first, second)]
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    first.grad, second.grad = torch.tensor([6.0]), torch.tensor([8.0])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.history()[0].norm == pytest.approx(5.0)


def test_an_iteration_that_nobody_listens_to_makes_no_view_of_the_history():
    parameter = torch.nn.Parameter(torch.zeros(16))
    parameter.grad = torch.ones(16)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones(()))

    def iteration() -> None:
        scaler.unscale_(optimizer)
        scaler.update()

    def views() -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            iteration()
        return sum(event.name == "aten::select" for event in profile.events())

    iteration()  # makes what is kept
    assert views() == 0
    scaler.register_on_skip(print)
    assert views() == 1


def test_history_can_be_left_out():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", history_size=0)
    step(scaler, model, optimizer)
    assert scaler.history() == []
    assert fastamp.GradScaler("cpu", enabled=False).history() == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"history_size": -1}, ValueError),
        ({"history_size": 1.5}, TypeError),
        ({"history_size": True}, TypeError),
        ({"history_size": 2**24}, ValueError),
        ({"fuse": 1}, TypeError),
        ({"keep_scaled_grads": None}, TypeError),
    ],
)
def test_options_out_of_range_are_refused(options, error):
    (name,) = options
    with pytest.raises(error, match=f"GradScaler: expected .*{name}.*got"):
        fastamp.GradScaler("cpu", **options)


def with_a_past():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=8.0, history_size=3)
    for bad in (None, {"0.bias": [INF]}, None, {"1.bias": [NAN]}):
        step(scaler, model, optimizer, bad)
    return scaler, model, optimizer


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda scaler: pickle.loads(pickle.dumps(scaler)),
        lambda scaler: _loaded(scaler),
    ],
    ids=["deepcopy", "pickle", "state_dict"],
)
def test_the_past_goes_with_the_state_if_history_was_asked_for(copied):
    scaler, model, optimizer = with_a_past()
    clone = copied(scaler)
    for _ in range(3):
        assert str(clone.history()) == str(scaler.history())
        assert clone.overflow_report() == scaler.overflow_report()
        assert str(clone.state_dict()) == str(scaler.state_dict())
        step(clone, model, optimizer)
        step(scaler, model, optimizer)
    assert clone.history()[-1].step == 6


def _loaded(scaler):
    fresh = fastamp.GradScaler("cpu", history_size=3)
    buffer = io.BytesIO()
    torch.save(scaler.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    return fresh


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_a_history_may_go_on_in_a_ring_of_another_size(size):
    scaler, model, optimizer = with_a_past()
    step(scaler, model, optimizer)
    other = fastamp.GradScaler("cpu", history_size=size)
    other.scale(torch.ones(()))
    other.load_state_dict(scaler.state_dict())
    for count in range(5):
        rows = other.history()
        kept = min(size, 3 + count)
        assert [row.step for row in rows] == list(range(5 + count - kept, 5 + count))
        assert str(rows[-3:]) == str(scaler.history()[-len(rows) :])
        step(scaler, model, optimizer)
        step(other, model, optimizer)


def test_torch_loads_the_state_and_we_load_torchs():
    scaler, *_ = with_a_past()
    reference = torch.amp.GradScaler("cpu")
    reference.load_state_dict(scaler.state_dict())
    assert reference.get_scale() == scaler.get_scale()
    scaler.load_state_dict(reference.state_dict())
    assert scaler.history() == []
    assert not scaler.overflow_report()
    plain = fastamp.GradScaler("cpu")
    assert list(plain.state_dict()) == list(reference.state_dict())


@pytest.mark.parametrize(
    "entry",
    [
        {"history": 3},
        {"history": [(1, 2.0, False)]},
        {"history": [(0, 1.0, False, 1.0, 0), (2, 1.0, False, 1.0, 0)]},
        {"overflow_report": {"step": 1}},
        {"overflow_report": "yes"},
        {"skipped_in_a_row": -1},
    ],
)
def test_a_malformed_past_is_refused_and_changes_nothing(entry):
    scaler, *_ = with_a_past()
    before = str(scaler.state_dict())
    with pytest.raises(ValueError, match=f'load_state_dict: expected .*"{next(iter(entry))}"'):
        scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0, **entry})
    assert str(scaler.state_dict()) == before


def test_what_is_new_leaves_the_instance_a_torch_scaler():
    states = [kind("cpu").__getstate__() for kind in SCALERS]
    assert list(states[0]) == list(states[1])
