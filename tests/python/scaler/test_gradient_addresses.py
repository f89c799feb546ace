# SPDX-License-Identifier: Apache-2.0
"""Kernels are called with addresses only where no other code can act in between."""

import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastamp
from fastamp import _C
from support.gradient_lists import gradients, plain_optimizer, unscale
from support.scaler_pairs import SCALERS


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def clip_at_step(optimizer, max_norm):
    """Has gradients checked by a pass that does not write them; (scaler, norm)."""
    optimizer._fastamp_supports_amp_step = True
    scaler = fastamp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    return scaler, scaler.clip_grad_norm_(optimizer, max_norm)


def test_dispatch_modes_see_the_operator():
    optimizer = plain_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    with Seen() as seen:
        scaler.unscale_(optimizer)
    assert seen.names.count("fastamp::unscale_and_check_") == 1
    assert all(g.eq(4.0).all() for g in gradients(optimizer))


def test_profilers_see_the_operator():
    optimizer = plain_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scaler.unscale_(optimizer)
    names = [event.key for event in profile.key_averages()]
    assert "fastamp::unscale_and_check_" in names
    assert all(g.eq(4.0).all() for g in gradients(optimizer))


def test_a_copy_on_write_gradient_is_copied_when_it_is_written_and_not_before():
    optimizer = plain_optimizer(2)
    source = torch.full((3,), 8.0)
    gradient = torch._lazy_clone(source)
    optimizer.param_groups[0]["params"][1].grad = gradient
    clip_at_step(optimizer, 1.0)
    assert torch._C._is_cow_tensor(gradient)
    unscale(fastamp.GradScaler, optimizer, scale=2.0)
    assert gradient.eq(4.0).all()
    assert source.eq(8.0).all()


def test_gradients_made_in_inference_mode_are_unscaled():
    optimizer = plain_optimizer(40)
    with torch.inference_mode():
        made = torch.full((3,), 8.0)
    with torch.inference_mode():
        optimizer.param_groups[0]["params"][7].grad = made
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert all(g.eq(4.0).all() for g in gradients(optimizer))
    gathered = _C.gather_parameters(optimizer.param_groups[0]["params"])
    assert gathered.recent_norm(torch.float32) is None


def test_a_gradient_shared_by_two_parameters_is_unscaled_once_and_for_each_by_torch():
    results = []
    for kind in (fastamp.GradScaler, torch.amp.GradScaler):
        for shared in (torch.full((3,), 8.0), torch.full((4, 4), 8.0)[:, 1]):
            optimizer = plain_optimizer(2)
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.data = torch.zeros_like(shared)
                parameter.grad = shared
            unscale(kind, optimizer, scale=2.0)
            results.append(shared.tolist())
    assert results == [[4.0] * 3, [4.0] * 4, [2.0] * 3, [2.0] * 4]


@pytest.mark.parametrize("kind", SCALERS)
def test_gradients_that_are_still_to_be_negated_are_refused_before_any_is_written(kind):
    optimizer = plain_optimizer(40)
    optimizer.param_groups[0]["params"][33].grad = torch._neg_view(torch.full((3,), 8.0))
    with pytest.raises(RuntimeError, match="negation"):
        unscale(kind, optimizer, scale=2.0)
    assert all(g.abs().eq(8.0).all() for g in gradients(optimizer))


def test_an_inverse_that_is_still_to_be_negated_is_negated():
    optimizer = plain_optimizer(2)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    inverse = torch._neg_view(torch.tensor(-0.5))
    scaler._unscale_grads_(optimizer, inverse, torch.zeros(()), False)
    assert all(g.eq(4.0).all() for g in gradients(optimizer))


def test_a_scale_that_is_still_to_be_negated_is_negated():
    optimizer = plain_optimizer(2)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler._scale = torch._neg_view(torch.tensor(-2.0))
    scaler.unscale_(optimizer)
    assert all(g.eq(4.0).all() for g in gradients(optimizer))


def test_a_scale_of_one_copies_no_copy_on_write_gradient():
    optimizer = plain_optimizer(2)
    gradient = torch._lazy_clone(torch.full((3,), 8.0))
    optimizer.param_groups[0]["params"][1].grad = gradient
    unscale(fastamp.GradScaler, optimizer, scale=1.0)
    assert torch._C._is_cow_tensor(gradient)


def test_a_refused_call_copies_no_copy_on_write_gradient():
    optimizer = plain_optimizer(41)
    parameters = optimizer.param_groups[0]["params"]
    parameters[0].grad = gradient = torch._lazy_clone(torch.full((3,), 8.0))
    parameters[40].data = torch.zeros(3, dtype=torch.float16)
    parameters[40].grad = torch.ones(3, dtype=torch.float16)
    with pytest.raises(ValueError, match="FP16"):
        unscale(fastamp.GradScaler, optimizer, scale=2.0)
    assert torch._C._is_cow_tensor(gradient)


VIEWS = {
    "whole": lambda gradient: gradient,
    "tail": lambda gradient: gradient[1:],
    "strided": lambda gradient: gradient[1::2],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("size", [4, 400_000])
@pytest.mark.parametrize("checks", [False, True])
def test_a_gradient_whose_memory_was_freed_is_refused_before_any_is_written(view, size, checks):
    made = [torch.full((size,), 8.0) for _ in range(3)]
    freed = VIEWS[view](made[1])
    made[1].untyped_storage().resize_(0)
    parameters = []
    for gradient in (made[0], freed, made[2]):
        parameters.append(torch.nn.Parameter(torch.zeros(gradient.shape)))
        parameters[-1].grad = gradient
    optimizer = types.SimpleNamespace(param_groups=[{"params": parameters}])
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    versions = [gradient._version for gradient in gradients(optimizer)]
    name = "norm_and_check_" if checks else "unscale_and_check_"
    arguments = (1.0,) if checks else ()
    optimizer._fastamp_supports_amp_step = checks
    call = scaler.clip_grad_norm_ if checks else scaler.unscale_
    with pytest.raises(ValueError, match=rf"{name}: expected grads\[1\] .* to have memory"):
        call(optimizer, *arguments)
    assert all(made[i].eq(8.0).all() for i in (0, 2))
    assert [gradient._version for gradient in gradients(optimizer)] == versions


def test_a_read_only_pass_bumps_the_versions_that_the_operator_bumps():
    optimizer = plain_optimizer(3)

    def versions():
        scaler, norm = clip_at_step(optimizer, 1.0)
        (flag,) = scaler._found_inf_per_device(optimizer).values()
        return [tensor._version for tensor in (flag, norm)]

    assert versions() == [1, 1]
    with Seen() as seen:
        assert versions() == [1, 1]
    assert "fastamp::norm_and_check_" in seen.names
    assert [g._version for g in gradients(optimizer)] == [0, 0, 0]
