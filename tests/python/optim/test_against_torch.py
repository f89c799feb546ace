# SPDX-License-Identifier: Apache-2.0
"""fastamp.optim against torch.optim, step by step, over the whole space of options."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.amp_reference import DEVICES
from support.optim_twins import SIZES, Twins, parameters

devices = pytest.mark.parametrize("device", DEVICES)
rates = st.floats(1e-5, 0.5) | st.floats(1e-5, 0.5).map(torch.tensor)
common = {
    "lr": rates,
    "weight_decay": st.just(0) | st.floats(1e-4, 0.5),
    "maximize": st.booleans(),
    "foreach": st.sampled_from([None, False]),
    "fused": st.sampled_from([None, False]),
}
sgd = st.fixed_dictionaries(
    common
    | {
        "momentum": st.just(0) | st.floats(0.1, 0.99),
        "dampening": st.just(0) | st.floats(0.0, 0.9),
        "nesterov": st.booleans(),
    }
)
adam = st.fixed_dictionaries(
    common
    | {
        "betas": st.tuples(st.floats(0.0, 0.99), st.floats(0.0, 0.9999)),
        "eps": st.sampled_from([1e-8, 1e-6, 1e-3]),
        "amsgrad": st.booleans(),
    }
)


def valid(group):
    """torch allows nesterov with momentum and no dampening only."""
    if group.get("nesterov"):
        group = group | {"dampening": 0, "nesterov": group["momentum"] > 0}
    return group


def check(name, groups, seed, device, steps=5):
    torch.manual_seed(seed)
    groups = [valid(g) | {"params": parameters(SIZES, device=device)} for g in groups]
    twins = Twins(name, groups)
    for step in range(steps):
        twins.set_gradients(absent={0, 3} if step == 2 else {step} if step < 2 else ())
        twins.step()


@devices
@given(groups=st.lists(sgd, min_size=1, max_size=4), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_sgd_follows_torch_for_all_options(device, groups, seed):
    check("SGD", groups, seed, device)


@devices
@given(
    groups=st.lists(adam, min_size=1, max_size=4),
    decoupled=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None)
def test_adam_follows_torch_for_all_options(device, groups, decoupled, seed):
    groups = [g | {"decoupled_weight_decay": decoupled} for g in groups]
    check("Adam", groups, seed, device)


@devices
@given(groups=st.lists(adam, min_size=1, max_size=4), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_adamw_follows_torch_for_all_options(device, groups, seed):
    check("AdamW", groups, seed, device)


@devices
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
        ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.2}),
        ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
        ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ],
)
def test_hundreds_of_steps(device, name, options):
    torch.manual_seed(7)
    twins = Twins(name, [{"params": parameters(device=device)}], **options)
    for step in range(300):
        twins.set_gradients(absent={step % 11})
        twins.step()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_hyperparameters_edited_between_steps_count(name):
    torch.manual_seed(3)
    options = {"momentum": 0.5} if name == "SGD" else {}
    twins = Twins(name, [{"params": parameters()}, {"params": parameters()}], lr=0.1, **options)
    for step in range(12):
        for optimizer in (twins.own, twins.torchs):
            first, second = optimizer.param_groups[:2]
            first["lr"] = 0.1 / (1 + step)
            second["weight_decay"] = 0.01 * step
            second["maximize"] = step % 2 == 0
        if step == 5:
            more = parameters()
            twins.mine += more
            twins.own.add_param_group({"params": more, "lr": 0.3})
            others = [torch.nn.Parameter(p.detach().clone()) for p in more]
            twins.others += others
            twins.torchs.add_param_group({"params": others, "lr": 0.3})
        if step == 8:  # In another order than the state was created.
            twins.own.param_groups.reverse()
            twins.torchs.param_groups.reverse()
        twins.set_gradients()
        twins.step()


def test_momentum_switched_on_later_starts_the_buffers():
    torch.manual_seed(4)
    twins = Twins("SGD", [{"params": parameters()}], lr=0.1, dampening=0.5)
    for step in range(6):
        for optimizer in (twins.own, twins.torchs):
            optimizer.param_groups[0]["momentum"] = 0.9 if step >= 2 else 0.0
        twins.set_gradients(absent={1} if step < 4 else ())
        twins.step()


def test_amsgrad_switched_on_later_starts_from_the_present_moment():
    (p,) = parameters(((4,),))
    optimizer = Twins("Adam", [{"params": [p]}]).own
    for amsgrad in (False, True):
        optimizer.param_groups[0]["amsgrad"] = amsgrad
        p.grad = torch.ones(4)
        optimizer.step()
    state = optimizer.state[p]
    assert torch.equal(state["max_exp_avg_sq"], state["exp_avg_sq"])


def test_default_options_and_groups_are_torchs():
    for name in ("SGD", "Adam", "AdamW"):
        twins = Twins(name, [{"params": parameters()}])
        assert twins.own.defaults == twins.torchs.defaults
        for mine, other in zip(twins.own.param_groups, twins.torchs.param_groups, strict=True):
            assert list(mine) == list(other)
        assert repr(twins.own) == repr(twins.torchs)
        assert isinstance(twins.own, type(twins.torchs))
