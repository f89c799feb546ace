# SPDX-License-Identifier: Apache-2.0
"""The warning of an optimizer that goes on from a checkpoint, and a scaler that does not."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
import fastamp.optim

Make = Callable[[nn.Module], torch.optim.Optimizer]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


MAKERS: dict[str, Make] = {
    "torch's AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "torch's fused AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "torch's SGD": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "fastamp's AdamW": lambda m: fastamp.optim.AdamW(m.parameters(), lr=1e-2),
    "fused": lambda m: fastamp.optim.fuse_(torch.optim.Adam(m.parameters(), lr=1e-2)),
    "groups of both orders": lambda m: torch.optim.AdamW(
        [{"params": [m.weight]}, {"lr": 1e-3, "params": [m.bias]}]
    ),
}


def new_scaler(**options: Any) -> fastamp.GradScaler:
    return fastamp.GradScaler("cpu", **{"init_scale": 1024.0, **options})


def train(model: nn.Module, optimizer: Any, scaler: Any, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def checkpoint(make: Make, steps: int = 3) -> dict[str, Any]:
    model = network()
    optimizer, scaler = make(model), new_scaler()
    train(model, optimizer, scaler, steps)
    file = io.BytesIO()
    states = {"model": model, "optimizer": optimizer, "scaler": scaler}
    torch.save({name: each.state_dict() for name, each in states.items()}, file)
    file.seek(0)
    saved: dict[str, Any] = torch.load(file, weights_only=True)
    return saved


def resumed(make: Make, saved: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    model.load_state_dict(saved["model"])
    optimizer = make(model)
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


SAID = (
    r"^GradScaler: expected a scaler that goes on where its optimizer does, got one that begins "
    r"anew, at a scale of 1024: \w+\.load_state_dict\(\) was called"
)


@pytest.mark.parametrize("name", MAKERS)
def test_a_scaler_that_begins_anew_is_warned_of_once(name: str):
    make = MAKERS[name]
    model, optimizer = resumed(make, checkpoint(make))
    scaler = new_scaler()
    with pytest.warns(UserWarning, match=SAID) as caught:
        train(model, optimizer, scaler, 3)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.fixture
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_order_of_loading_and_making_does_not_matter():
    make = MAKERS["torch's AdamW"]
    saved = checkpoint(make)
    scaler = new_scaler()
    model, optimizer = resumed(make, saved)  # After the scaler was made.
    with pytest.warns(UserWarning, match=SAID):
        train(model, optimizer, scaler)


def test_one_of_two_optimizers_is_enough_and_one_warning_too():
    make = MAKERS["torch's AdamW"]
    saved = checkpoint(make)
    fresh, (model, optimizer) = network(), resumed(make, saved)
    first, scaler = make(fresh), new_scaler()

    def step() -> None:
        for each, of in ((fresh, first), (model, optimizer)):
            scaler.scale(each(torch.ones(3, 4)).sum()).backward()
            scaler.step(of)
        scaler.update()

    with pytest.warns(UserWarning, match=SAID) as caught:
        step()
    step()
    assert len(caught) == 1


def loaded(saved: dict[str, Any]) -> Any:
    scaler = new_scaler()
    scaler.load_state_dict(saved["scaler"])
    return scaler


def by_json(saved: dict[str, Any]) -> Any:
    return fastamp.GradScaler.from_json(loaded(saved).to_json(), "cpu")


def unpickled(saved: dict[str, Any]) -> Any:
    return pickle.loads(pickle.dumps(loaded(saved)))


def copied(saved: dict[str, Any]) -> Any:
    return copy.deepcopy(loaded(saved))


def meant(_: dict[str, Any]) -> Any:
    scaler = new_scaler()
    scaler.load_state_dict(scaler.state_dict())
    return scaler


def disabled(_: dict[str, Any]) -> Any:
    return new_scaler(enabled=False)


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("make_scaler", [loaded, by_json, unpickled, copied, meant, disabled])
@pytest.mark.parametrize("name", MAKERS)
def test_a_scaler_with_a_state_and_one_that_is_meant_are_not_warned_of(name: str, make_scaler: Any):
    make = MAKERS[name]
    saved = checkpoint(make)
    train(*resumed(make, saved), make_scaler(saved), 2)


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("name", MAKERS)
def test_what_was_not_loaded_is_not_warned_of(name: str):
    make = MAKERS[name]
    model = network()
    optimizer = make(model)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()  # Without a scaler, such as a warm-up in float32.
    train(model, optimizer, new_scaler(), 2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, new_scaler(), 2)  # Another scaler: check's rule, and not this one.
    schedule.step()
    train(model, optimizer, new_scaler())


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("name", MAKERS)
def test_a_checkpoint_of_no_step_is_not_warned_of(name: str):
    make = MAKERS[name]
    train(*resumed(make, checkpoint(make, steps=0)), new_scaler())


@pytest.mark.usefixtures("no_warnings")
def test_a_state_that_is_loaded_in_the_middle_of_a_run_is_not_warned_of():
    make = MAKERS["torch's AdamW"]
    saved, model = checkpoint(make), network()
    optimizer, scaler = make(model), new_scaler()
    train(model, optimizer, scaler)
    optimizer.load_state_dict(saved["optimizer"])  # Back to the best so far; the scale goes on.
    train(model, optimizer, scaler)


@pytest.mark.usefixtures("no_warnings")
def test_optimizers_of_others_without_groups_or_states_pass():
    class Bare:
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters)}]

        def zero_grad(self) -> None:
            pass

        def step(self) -> None:
            pass

    model = network()
    train(model, Bare(model.parameters()), new_scaler())


def test_a_warning_that_is_an_error_changes_nothing():
    make = MAKERS["torch's AdamW"]
    model, optimizer = resumed(make, checkpoint(make))
    before = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=SAID):
            train(model, optimizer, new_scaler())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
