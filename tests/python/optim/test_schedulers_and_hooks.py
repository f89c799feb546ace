# SPDX-License-Identifier: Apache-2.0
"""Optimizers among others: schedulers, hooks, closures, compile, shards, torch's scaler."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.optim.optimizer as hooks

import fastamp
from fastamp._C import AmpStep
from support.optim_twins import PAIRS, Twins, copies, parameters

names = pytest.mark.parametrize("name", PAIRS)


@names
def test_closures_run_with_gradients_and_their_result_comes_back(name):
    (p,) = parameters(((4,),))
    (q,) = copies([p])
    own, torchs = (cls([t], lr=0.1) for cls, t in zip(PAIRS[name], (p, q), strict=True))

    def closure_of(optimizer, t):
        def closure():
            optimizer.zero_grad()
            loss = (t**2).sum()
            loss.backward()
            return loss

        return closure

    with torch.no_grad():
        for _ in range(4):
            first, second = own.step(closure_of(own, p)), torchs.step(closure_of(torchs, q))
            assert first.item() == pytest.approx(second.item())
    torch.testing.assert_close(p.detach(), q.detach())


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(
        o, 0.01, 0.1, cycle_momentum="momentum" in o.defaults
    ),
}


@names
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_learning_rate_schedulers(name, scheduler, tensor_lr):
    torch.manual_seed(1)
    options = {"momentum": 0.9} if name == "SGD" else {}
    rate = torch.tensor(0.05) if tensor_lr else 0.05
    twins = Twins(name, [{"params": parameters()}], lr=copy.deepcopy(rate), **options)
    for group in twins.torchs.param_groups:
        group["lr"] = copy.deepcopy(rate)
    first, second = SCHEDULERS[scheduler](twins.own), SCHEDULERS[scheduler](twins.torchs)
    arguments = (1.0,) if scheduler == "ReduceLROnPlateau" else ()
    for _ in range(10):
        twins.set_gradients()
        twins.step()
        first.step(*arguments)
        second.step(*arguments)


def test_tensor_learning_rates_are_read_when_the_step_runs():
    (p,) = parameters(((1,),))
    with torch.no_grad():
        p.zero_()
    rate = torch.tensor(1.0)
    optimizer = fastamp.optim.SGD([p], lr=rate)
    for value in (1.0, 2.0, 4.0):
        rate.fill_(value)
        p.grad = torch.ones(1)
        optimizer.step()
    assert p.item() == -7.0
    assert optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.int64, "parameter"])
def test_tensor_learning_rates_of_other_dtypes(kind):
    (p,) = parameters(((1,),))
    with torch.no_grad():
        p.zero_()
    rate = torch.tensor(1.0, requires_grad=True) if kind == "parameter" else torch.tensor(1)
    optimizer = fastamp.optim.SGD([p], lr=rate if kind == "parameter" else rate.to(kind))
    optimizer.add_param_group({"params": parameters(((2,),)), "lr": 0.5})
    p.grad = torch.ones(1)
    optimizer.step()
    assert p.item() == -1.0


def test_tensor_betas_and_weight_decay():
    torch.manual_seed(2)
    betas = (torch.tensor(0.8), torch.tensor(0.9))
    (p,) = parameters(((5,),))
    q = copies([p])[0]
    own = fastamp.optim.Adam([p], betas=betas)
    torchs = torch.optim.Adam([q], betas=tuple(b.item() for b in betas))
    for _ in range(3):
        p.grad = torch.randn(5)
        q.grad = p.grad.clone()
        own.step()
        torchs.step()
    torch.testing.assert_close(p.detach(), q.detach())
    optimizer = fastamp.optim.SGD([p], lr=1.0, weight_decay=torch.tensor(0.5))
    p.grad = torch.zeros(5)
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p.detach(), before * 0.5)


@names
def test_global_and_own_step_hooks(name):
    (p,) = parameters(((2,),))
    optimizer = PAIRS[name][0]([p], lr=1.0)
    p.grad = torch.zeros(2)
    seen = []
    handles = [
        hooks.register_optimizer_step_pre_hook(lambda *_: seen.append("global")),
        hooks.register_optimizer_step_post_hook(lambda *_: seen.append("after")),
        optimizer.register_step_pre_hook(lambda *_: seen.append("own")),
    ]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    assert seen == ["global", "own", "after"]


def test_hooks_may_change_gradients_and_arguments():
    (p,) = parameters(((2,),))
    with torch.no_grad():
        p.zero_()
    optimizer = fastamp.optim.SGD([p], lr=1.0)

    def closure():
        p.grad = torch.ones(2)
        return 5.0

    optimizer.register_step_pre_hook(lambda _, args, kwargs: ((*args, closure), kwargs))
    assert optimizer.step() == 5.0
    assert p.tolist() == [-1.0, -1.0]


@names
def test_torchs_own_scaler_drives_them_by_its_protocol(name):
    torch.manual_seed(3)
    twins = Twins(name, [{"params": parameters()}], lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    for step in range(8):
        twins.set_gradients(lambda p: torch.randn_like(p) * 64.0)
        if step in (0, 3):
            for params in (twins.mine, twins.others):
                params[1].grad.fill_(math.inf)
        for scaler, optimizer in zip(scalers, (twins.own, twins.torchs), strict=True):
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        for p, q in zip(twins.mine, twins.others, strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
    assert scalers[0].state_dict() == scalers[1].state_dict()


@pytest.mark.parametrize("fused", [None, True])
def test_none_of_them_claims_to_scale_by_itself(fused):
    for own, _ in PAIRS.values():
        optimizer = own(parameters(), fused=fused)
        assert not optimizer._step_supports_amp_scaling
        optimizer.load_state_dict(optimizer.state_dict())
        assert not optimizer._step_supports_amp_scaling
        assert not copy.deepcopy(optimizer)._step_supports_amp_scaling


@names
def test_differentiable_steps_are_torchs(name):
    torch.manual_seed(4)
    results = []
    for cls in PAIRS[name]:
        rate = torch.tensor(0.1, requires_grad=True)
        start = torch.linspace(-1, 1, 5).requires_grad_()
        p = start.clone()
        optimizer = cls([p], lr=rate, differentiable=True)
        p.grad = torch.linspace(1, 2, 5)
        optimizer.step()
        p.sum().backward()
        results.append((p.detach(), rate.grad, start.grad))
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)


@names
def test_torchs_refusals_are_kept(name):
    own, torchs = PAIRS[name]
    wrong = [
        {"lr": -1.0},
        {"lr": torch.tensor([0.1, 0.2])},
        {"weight_decay": -1.0},
        {"fused": True, "foreach": True},
        {"fused": True, "differentiable": True},
    ]
    wrong += [{"nesterov": True}, {"momentum": -1.0}] if name == "SGD" else []
    wrong += [{"betas": (1.0, 0.9)}, {"betas": (0.9, 1.0)}, {"eps": -1.0}] if name != "SGD" else []
    for options in wrong:
        raised = []
        for cls in (own, torchs):
            with pytest.raises((ValueError, RuntimeError)) as info:
                cls(parameters(), **options)
            raised.append((info.type, str(info.value)))
        assert raised[0] == raised[1]
    for params in ([], torch.ones(2), [1]):
        raised = []
        for cls in (own, torchs):
            with pytest.raises((ValueError, TypeError)) as info:
                cls(params)
            raised.append((info.type, str(info.value)))
        assert raised[0] == raised[1]


@names
def test_training_reaches_the_minimum(name):
    torch.manual_seed(6)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = PAIRS[name][0](
        model.parameters(), **({"lr": 0.1, "momentum": 0.9} if name == "SGD" else {"lr": 0.02})
    )
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True).sin()
    for _ in range(300):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer._fastamp_pending_amp_step = AmpStep(found_inf=torch.zeros(()))
        optimizer.step()
    assert loss.item() < 0.01
