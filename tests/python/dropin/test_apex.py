# SPDX-License-Identifier: Apache-2.0
"""apex's scale_loss and master_params."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fastamp
import fastamp.amp as amp
import fastamp.torch

FP16, INF = torch.float16, float("inf")


def trainable(*values: float, lr: float = 0.5) -> tuple[torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(torch.tensor(values))
    return parameter, torch.optim.SGD([parameter], lr=lr)


def backward(loss: torch.Tensor, optimizers: Any, **kwargs: Any) -> float:
    with amp.scale_loss(loss, optimizers, **kwargs) as scaled:
        scaled.backward()
    return float(scaled)


def test_it_is_reachable_under_every_name():
    functions = {
        fastamp.amp.scale_loss,
        fastamp.cuda.amp.scale_loss,
        fastamp.torch.amp.scale_loss,
        fastamp.torch.cuda.amp.scale_loss,
    }
    assert len(functions) == 1
    assert fastamp.torch.amp.master_params is fastamp.cuda.amp.master_params is amp.master_params


def test_one_iteration_scales_unscales_and_steps():
    parameter, optimizer = trainable(1.0, 2.0)
    assert backward((parameter * 3).sum(), optimizer) == 9.0 * 65536
    assert parameter.grad.tolist() == [3.0, 3.0]
    optimizer.step()
    assert parameter.tolist() == [-0.5, 0.5]
    assert amp.loss_scaler(optimizer).get_scale() == 65536.0


def test_training_follows_the_trajectory_of_a_grad_scaler():
    def model() -> Any:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        return net, torch.optim.Adam(net.parameters(), lr=0.1)

    (own, optimizer), (torchs, reference) = model(), model()
    scaler = torch.amp.GradScaler("cpu")
    data = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    for i, x in enumerate(data.split(2)):
        factor = INF if i in (1, 2) else 1.0
        optimizer.zero_grad()
        backward(own(x).square().mean() * factor, optimizer)
        optimizer.step()
        reference.zero_grad()
        scaler.scale(torchs(x).square().mean() * factor).backward()
        scaler.step(reference)
        scaler.update()
        assert amp.loss_scaler(optimizer).get_scale() == scaler.get_scale()
        for a, b in zip(own.parameters(), torchs.parameters(), strict=True):
            assert torch.equal(a, b)
    assert scaler.get_scale() == 65536.0 / 4
    assert amp.loss_scaler(optimizer).state_dict() == scaler.state_dict()


def test_an_overflow_skips_one_step_of_each_optimizer_and_lowers_the_scale():
    (p, a), (q, b) = trainable(1.0), trainable(1.0)
    backward((p * INF).sum() + q.sum(), [a, b])
    assert amp.loss_scaler(a).get_scale() == 32768.0
    assert a.step() is None
    b.step()
    assert (p.item(), q.item()) == (1.0, 1.0)
    assert "step" not in vars(a)
    assert "step" not in vars(b)
    for optimizer in (a, b):
        optimizer.zero_grad()
    backward(p.sum() + q.sum(), [a, b])
    a.step()
    b.step()
    assert (p.item(), q.item()) == (0.5, 0.5)


def test_two_overflows_before_a_step_skip_one_step():
    p, optimizer = trainable(1.0)
    for _ in range(2):
        backward((p * INF).sum(), optimizer)
    optimizer.step()
    assert p.item() == 1.0
    optimizer.zero_grad()
    backward(p.sum(), optimizer)
    optimizer.step()
    assert p.item() == 0.5


def test_skips_work_with_patched_steps_and_schedulers():
    p, optimizer = trainable(1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    inner = optimizer.step

    def patched(*args: Any) -> Any:
        calls.append(args)
        return inner(*args)

    optimizer.step = patched
    backward(p.sum(), optimizer)
    optimizer.step()
    scheduler.step()
    backward((p * INF).sum(), optimizer)
    kept = optimizer.step
    kept()
    assert optimizer.step is patched
    optimizer.zero_grad()
    backward(p.sum(), optimizer)
    kept()  # whoever kept the skipping function reaches the optimizer again
    assert len(calls) == 2
    assert p.item() == pytest.approx(1.0 - 0.5 - 0.05)


def test_several_losses_add_up_each_with_its_scale():
    p, optimizer = trainable(2.0)
    backward((p * 3).sum(), optimizer, loss_id=0)
    first = p.grad
    amp.loss_scaler(optimizer, 0).update(8.0)
    backward((p * 5).sum(), optimizer, loss_id=1)
    assert p.grad is first
    assert p.grad.item() == 8.0
    assert backward(p.sum(), optimizer, loss_id=0) == 2.0 * 8.0
    assert p.grad.item() == 9.0
    assert amp.loss_scaler(optimizer, 1).get_scale() == 65536.0


def test_delayed_gradients_add_up_scaled_and_are_unscaled_once():
    p, optimizer = trainable(1.0)
    p.grad = torch.tensor([0.25])
    backward((p * 3).sum(), optimizer, delay_unscale=True)
    assert p.grad.item() == 3.25 * 65536
    backward((p * 4).sum(), optimizer, delay_unscale=True)
    assert p.grad.item() == 7.25 * 65536
    with pytest.raises(RuntimeError, match="another loss left scaled"):
        backward(p.sum(), optimizer, loss_id=1)
    backward((p * 5).sum(), optimizer)
    assert p.grad.item() == 12.25
    assert amp.loss_scaler(optimizer)._growth_tracker.item() == 1


def test_an_exception_in_the_block_leaves_gradients_and_scale():
    p, optimizer = trainable(1.0)
    p.grad = grad = torch.tensor([0.5])

    def fail() -> None:
        with amp.scale_loss(p.sum(), optimizer) as scaled:
            scaled.backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert p.grad is grad
    assert grad.item() == 0.5
    assert amp.loss_scaler(optimizer).get_scale() == 65536.0
    backward(p.sum(), optimizer)
    assert p.grad.item() == 1.5


def test_blocks_of_one_optimizer_do_not_nest():
    p, optimizer = trainable(1.0)
    with amp.scale_loss(p.sum(), optimizer) as scaled:
        with pytest.raises(RuntimeError, match="expected optimizers outside other scale_loss"):
            amp.scale_loss(p.sum(), [optimizer]).__enter__()
        scaled.backward()
    assert p.grad.item() == 1.0


@pytest.mark.parametrize("bad", [None, [], "sgd", [torch.nn.Linear(1, 1)]])
def test_what_is_no_optimizer_is_refused(bad: Any):
    with pytest.raises(TypeError, match="scale_loss: expected an optimizer or a list of them, got"):
        amp.scale_loss(torch.ones(()), bad).__enter__()


def test_float16_gradients_are_refused_and_nothing_is_lost():
    parameter = torch.nn.Parameter(torch.ones(2, dtype=FP16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with pytest.raises(ValueError, match="FP16"):
        backward(parameter.sum() * 1e-3, optimizer)
    assert parameter.grad is None


def test_half_losses_are_scaled_in_float32_and_double_losses_stay():
    p, optimizer = trainable(1.0)
    with amp.scale_loss(torch.full((), 3.0, dtype=FP16), optimizer) as scaled:
        assert scaled.dtype == torch.float32
        assert scaled.item() == 3 * 65536  # inf in float16
    amp.loss_scaler(optimizer).update(8.0)
    with amp.scale_loss((p * 3).half().sum(), optimizer) as scaled:
        scaled.backward()
    with amp.scale_loss(p.double().sum(), optimizer) as scaled:
        assert scaled.dtype == torch.float64
        scaled.backward()
    assert p.grad.item() == 4.0


def test_a_loss_that_reaches_no_parameter_changes_nothing():
    p, optimizer = trainable(1.0)
    x = torch.ones((), requires_grad=True)
    backward(x * 2, optimizer)
    assert p.grad is None
    assert amp.loss_scaler(optimizer).state_dict()["_growth_tracker"] == 0
    optimizer.step()


def test_master_params_yields_every_parameter_in_order():
    a, b, c = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [a, b]}, {"params": [c], "lr": 0.1}], lr=1.0)
    assert [id(p) for p in amp.master_params(optimizer)] == [id(a), id(b), id(c)]


def test_the_scale_of_an_optimizer_is_its_own_and_can_be_saved():
    p, a = trainable(1.0)
    _, b = trainable(1.0)
    with pytest.raises(KeyError, match="scale_loss was used with"):
        amp.loss_scaler(b)
    backward((p * INF).sum(), a)
    state = copy.deepcopy(amp.loss_scaler(a).state_dict())
    assert state["scale"] == 32768.0
    fresh = fastamp.GradScaler("cpu")
    fresh.load_state_dict(state)
    assert fresh.get_scale() == 32768.0
