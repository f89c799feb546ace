# SPDX-License-Identifier: Apache-2.0
"""torch.optim.swap_in_optimizer_params_and_state with fused optimizers: torch 2.13 and later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fastamp

swap_in = getattr(torch.optim, "swap_in_optimizer_params_and_state", None)
pytestmark = pytest.mark.skipif(
    swap_in is None,
    reason="this torch has no swap_in_optimizer_params_and_state: it is from 2.13 on",
)

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1},
    "Muon": {"lr": 0.1},
}


def trained(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> Any:
    """A model after a step, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    optimizer = kind(model.parameters(), **options)
    step(optimizer, model.weight, 1.0)
    return model, optimizer


def step(optimizer: torch.optim.Optimizer, weight: torch.Tensor, value: float) -> None:
    weight.grad = torch.full_like(weight, value)
    weight.grad[0, 0] = 3 * value
    optimizer.step()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_of_other_tensors_leaves_the_optimizers_own_alone(name: str):
    model, optimizer = trained(getattr(fastamp.optim, name), OPTIONS[name])
    other, expected = trained(getattr(fastamp.optim, name), OPTIONS[name])
    weight = model.weight.detach().clone().requires_grad_()
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(optimizer.state_dict())
    before = model.weight.detach().clone()
    with swap_in(optimizer, {"weight": weight}, state):
        step(optimizer, weight, 2.0)
    step(expected, other.weight, 2.0)
    assert torch.equal(weight, other.weight)
    for key, value in expected.state_dict()["state"][0].items():
        assert torch.equal(torch.as_tensor(state["state"][0][key]), torch.as_tensor(value)), key
    assert torch.equal(model.weight, before)
    for key, value in kept["state"][0].items():
        assert torch.equal(torch.as_tensor(optimizer.state_dict()["state"][0][key]), value), key
    step(optimizer, model.weight, 2.0)
    assert torch.equal(model.weight, other.weight)
