# SPDX-License-Identifier: Apache-2.0
"""Gradients of every kind of tensor: fastamp does with them what torch does, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastamp
from support.tensor_kinds import KINDS, Convert, home_of, plain_parts, set_gradient
from support.torch_lists import same

GRADIENTS = [kind for kind in KINDS if kind not in ("quantized", "inference", "dual")]


def numbers() -> list[torch.Tensor]:
    """Made outside of the kind's home, where tensors may be of the kind already."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator) for _ in range(6)]


def neighbours_of(kind: str) -> Convert:
    # torch's foreach operators crash on functional tensors among ordinary ones. Ordinary ones among
    # fake ones they leave scaled, among TwoTensors they unscale them twice.
    if kind in ("functional", "fake", "two tensors"):
        return KINDS[kind]
    return lambda tensor: tensor


def parameters_of(kind: str, numbers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the kind, and ordinary ones on both sides of it."""
    left = iter(numbers)
    parameters = []
    for how in (neighbours_of(kind), KINDS[kind], neighbours_of(kind)):
        value = how(next(left))
        # Parameter() cannot take a functional tensor.
        parameter = value.requires_grad_() if kind == "functional" else torch.nn.Parameter(value)
        set_gradient(parameter, how(next(left)))
        parameters.append(parameter)
    return parameters


def outcome(parameters: list[torch.Tensor], run: Callable[[], Any]) -> Any:
    try:
        result = run()
        return plain_parts([result, [(p, p.grad) for p in parameters]])
    except Exception as error:
        return type(error)


def agree(expected: Any, got: Any) -> bool:
    if isinstance(expected, type) or isinstance(got, type):
        return expected is got
    return same(expected, got)


def unscale(scaler: Any, optimizer: Any) -> Any:
    scaler.unscale_(optimizer)
    return [float(flag) for flag in scaler._found_inf_per_device(optimizer).values()]


def step(scaler: Any, optimizer: Any) -> Any:
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("job", [unscale, step])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_unscaling_and_stepping_is_torchs(kind: str, job: Callable[..., Any]):
    outcomes = []
    made = [numbers(), numbers()]
    with home_of(kind):
        for scaler_class in (torch.amp.GradScaler, fastamp.GradScaler):
            parameters = parameters_of(kind, made.pop())
            optimizer = torch.optim.SGD(parameters, lr=0.5)
            scaler = scaler_class("cpu", init_scale=4.0)
            scaler.scale(torch.ones(()))
            outcomes.append(outcome(parameters, lambda s=scaler, o=optimizer: job(s, o)))
    assert agree(*outcomes), outcomes


@pytest.mark.parametrize("kind", GRADIENTS)
def test_the_norm_is_torchs(kind: str):
    outcomes = []
    made = [numbers(), numbers()]
    with home_of(kind):
        for clip in (torch.nn.utils.clip_grad_norm_, fastamp.clip_grad_norm_):
            parameters = parameters_of(kind, made.pop())
            outcomes.append(outcome(parameters, lambda c=clip, p=parameters: c(p, 0.5)))
    expected, got = outcomes
    if isinstance(expected, list) and isinstance(got, list):
        for e, g in zip(expected, got, strict=True):
            if isinstance(e, torch.Tensor):
                torch.testing.assert_close(g, e)
        return
    assert expected is got or isinstance(got, list), outcomes


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize(
    ("torchs", "of_fastamp"),
    [(torch.optim.SGD, fastamp.optim.SGD), (torch.optim.AdamW, fastamp.optim.AdamW)],
    ids=["sgd", "adamw"],
)
def test_a_fused_step_takes_what_torchs_step_takes(kind: str, torchs: Any, of_fastamp: Any):
    outcomes = []
    made = [numbers(), numbers()]
    with home_of(kind):
        for optimizer_class in (torchs, of_fastamp):
            parameters = parameters_of(kind, made.pop())
            optimizer = optimizer_class(parameters, lr=0.5)
            outcomes.append(outcome(parameters, optimizer.step))
    expected, got = outcomes
    if isinstance(expected, list) and isinstance(got, list):
        for e, g in zip(expected, got, strict=True):
            if isinstance(e, torch.Tensor):
                torch.testing.assert_close(g, e)
        return
    assert expected is got or isinstance(got, list), outcomes


def test_a_float16_gradient_of_a_nested_parameter_is_refused_as_any_other():
    value = KINDS["nested"](torch.randn(4, 4)).half()
    parameter = torch.nn.Parameter(value)
    set_gradient(parameter, value.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("kind", ["nested", "csr", "mkldnn"])
def test_what_cannot_be_unscaled_is_refused_by_name_before_anything_is_written(kind: str):
    parameters = parameters_of(kind, numbers())
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    before = parameters[0].grad.clone()
    what = (
        "a nested one" if kind == "nested" else f"one of layout {kind.replace('csr', 'SparseCsr')}"
    )
    what = what.replace("layout mkldnn", "layout Mkldnn")
    with pytest.raises(NotImplementedError, match=f"unscale_: expected gradients .* got {what}"):
        scaler.unscale_(optimizer)
    assert torch.equal(parameters[0].grad, before)


@pytest.mark.parametrize("kind", ["fake", "two tensors"])
def test_ordinary_gradients_among_subclasses_are_unscaled_once(kind: str):
    """Torch does not unscale them, or does it twice: see neighbours_of()."""
    ordinary = torch.nn.Parameter(torch.ones(3))
    ordinary.grad = torch.full((3,), 8.0)
    odd = torch.nn.Parameter(KINDS[kind](torch.ones(3)))
    odd.grad = KINDS[kind](torch.ones(3))
    optimizer = torch.optim.SGD([odd, ordinary], lr=0.5)
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert torch.equal(ordinary.grad, torch.full((3,), 2.0))
