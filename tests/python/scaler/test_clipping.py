# SPDX-License-Identifier: Apache-2.0
"""Clipping through the scaler and fastamp.clip_grad_norm_, against torch's."""

import copy
import gc
import weakref

import pytest
import torch

import fastamp
from support.clipping import (
    SHAPES,
    assert_gradients_near,
    near,
    torch_clip,
    twins_with_gradients,
    unscaled,
)
from support.scaler_pairs import bits, set_gradients, twin_parameters


@pytest.mark.parametrize("dropped", ["before the step", "after it"])
def test_gradients_are_kept_alive_from_unscaling_to_the_end_of_the_iteration(dropped):
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    scaler, optimizer = unscaled([parameter])
    gone = weakref.ref(parameter.grad)
    if dropped == "before the step":
        parameter.grad = None
        assert gone() is not None
    scaler.step(optimizer)
    scaler.update()
    parameter.grad = None
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "RMSprop"])
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_the_scaler_clips_as_the_ordinary_sequence(optimizer, unscale_first, norm_type):
    shapes = [shape for shape in SHAPES if 0 not in shape]  # torch has no inf-norm of nothing.
    own, torchs = twin_parameters(shapes, 0)
    optimizers = [getattr(torch.optim, optimizer)(p, lr=0.1) for p in (own, torchs)]
    scalers = [fastamp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", 8.0)]
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        values = [torch.randn(shape, generator=generator) * 9 for shape in shapes]
        if step == 3:
            values[0][0, 0] = float("inf")
        set_gradients([own, torchs], values)
        for scaler in scalers:
            scaler.scale(torch.ones(()))
        if unscale_first:
            scalers[0].unscale_(optimizers[0])
        norm = scalers[0].clip_grad_norm_(optimizers[0], 0.5, norm_type)
        scalers[1].unscale_(optimizers[1])
        expected = torch_clip(torchs, 0.5, norm_type)
        assert near(norm.item(), expected.item())
        assert_gradients_near(own, torchs)
        for scaler, stepped in zip(scalers, optimizers, strict=True):
            scaler.step(stepped)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for left, right in zip(own, torchs, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_clipping_by_value_after_unscaling():
    own, torchs = twins_with_gradients()
    optimizer = torch.optim.SGD(own, lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=0.5)
    scaler.scale(torch.ones(()))
    scaler.clip_grad_value_(optimizer, 0.75)
    kept = unscaled(torchs, 0.5)
    torch.nn.utils.clip_grad_value_(torchs, 0.75)
    for left, right in zip(own, torchs, strict=True):
        assert bits(left.grad) == bits(right.grad)
    del kept


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_out_of_turn_is_refused(name):
    own, _ = twins_with_gradients()
    optimizer = torch.optim.SGD(own, lr=0.1)
    scaler = fastamp.GradScaler("cpu")
    with pytest.raises(AssertionError, match=f"{name} but _scale is None"):
        getattr(scaler, name)(optimizer, 1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    before = copy.deepcopy([p.grad for p in own])
    with pytest.raises(RuntimeError, match=f"{name}: expected a call before step"):
        getattr(scaler, name)(optimizer, 1.0)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, own, strict=True))


def test_a_disabled_scaler_clips_too():
    own, torchs = twins_with_gradients()
    optimizer = torch.optim.SGD(own, lr=0.1)
    scaler = fastamp.GradScaler("cpu", enabled=False)
    norm = scaler.clip_grad_norm_(optimizer, 0.5)
    assert near(norm.item(), torch_clip(torchs, 0.5).item())
    assert_gradients_near(own, torchs)
    scaler.clip_grad_value_(optimizer, 0.01)
    assert max(p.grad.abs().max().item() for p in own if p.grad.numel()) <= 0.01


def test_error_if_nonfinite_leaves_the_gradients_unclipped():
    own, _ = twins_with_gradients()
    own[0].grad[0, 0] = float("inf")
    optimizer = torch.optim.SGD(own, lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    before = [bits(p.grad) for p in own]
    with pytest.raises(RuntimeError, match="expected finite gradients"):
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert [bits(p.grad) for p in own] == before
    scaler.step(optimizer)  # The step is skipped as usual.
    scaler.update()
    assert scaler.get_scale() == 0.5


@pytest.mark.parametrize("kind", [torch.optim.SGD, fastamp.optim.SGD])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_sparse_gradients_are_stepped_by_the_norm_of_their_sums(kind, norm_type):
    parameter = torch.nn.Parameter(torch.zeros(4, 1))
    indices = torch.tensor([[1, 1, 2]])
    parameter.grad = torch.sparse_coo_tensor(indices, torch.tensor([[3.0], [3.0], [8.0]]), (4, 1))
    optimizer = kind([parameter], lr=1.0)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    expected = torch.tensor([0.0, 3.0, 4.0, 0.0])
    norm = scaler.clip_grad_norm_(optimizer, 1.0, norm_type)
    assert norm.item() == pytest.approx(torch.linalg.vector_norm(expected, norm_type).item())
    scaler.step(optimizer)
    scaler.update()
    stepped = -expected / norm
    torch.testing.assert_close(parameter.detach().flatten(), stepped, rtol=1e-5, atol=1e-6)


def test_sparse_gradients_are_clipped_by_the_norm_of_their_sums():
    parameter = torch.nn.Parameter(torch.zeros(4, 1))
    indices = torch.tensor([[1, 1, 2]])
    parameter.grad = torch.sparse_coo_tensor(indices, torch.tensor([[3.0], [3.0], [8.0]]), (4, 1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    assert norm.item() == pytest.approx(5.0)  # (6 / 2, 8 / 2)
    assert parameter.grad.to_dense().norm().item() == pytest.approx(1.0, abs=1e-5)
