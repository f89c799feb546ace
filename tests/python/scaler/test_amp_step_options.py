# SPDX-License-Identifier: Apache-2.0
"""Options and odd orders of steps that get an AmpStep."""

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastamp
import fastamp.optim
from support.amp_step_pairs import (
    CASES,
    SHAPES,
    assert_close,
    gradients,
    pair,
    step_both,
    supports_amp_step,
)
from support.scaler_pairs import set_gradients


def test_gradients_stay_scaled_without_write_grads():
    first, second = pair("AdamW", {"lr": 0.01}, keep_scaled_grads=True)
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    for _ in range(20):
        values, _ = gradients(generator, rng)
        set_gradients([first[0], second[0]], values)
        for parameters, optimizer, scaler in (first, second):
            scaler.scale(torch.ones(()))
            if scaler is first[2]:
                scaler.clip_grad_norm_(optimizer, 0.5)
            else:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            scaler.step(optimizer)
            scaler.update()
        for parameter, value in zip(first[0], values, strict=True):
            torch.testing.assert_close(parameter.grad, value, rtol=0, atol=0, equal_nan=True)
        assert_close(first, second, grads=False)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_fuse_takes_over_the_optimizers_of_torch(name):
    first, second = pair(name, {"lr": 0.01})
    own = getattr(torch.optim, name)(first[0], lr=0.01)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, fuse=True)
    first = (first[0], own, scaler)
    rng, generator = random.Random(5), torch.Generator().manual_seed(5)
    for _ in range(20):
        step_both(first, second, generator, rng)
    assert supports_amp_step(own)
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.RMSprop([other]))  # Others are stepped as ever.
    assert not torch.equal(other, torch.ones(2))


def test_fp16_parameters_with_masters_are_stepped():
    half, full = torch.nn.Parameter(torch.ones(5).half()), torch.nn.Parameter(torch.ones(5))
    own, torchs = fastamp.optim.AdamW([half], lr=0.01), torch.optim.AdamW([full], lr=0.01)
    scaler = fastamp.GradScaler("cpu", init_scale=16.0)
    generator = torch.Generator().manual_seed(0)
    for number in range(20):
        scaler.scale(torch.ones(()))
        scale = scaler.get_scale()
        half.grad = (torch.randn(5, generator=generator) * scale).half()
        if number == 7:
            half.grad[0] = float("inf")
        full.grad = half.grad.float() / scale
        scaler.step(own)
        scaler.update()
        if number != 7:
            torchs.step()
    torch.testing.assert_close(half.float(), full, rtol=1e-3, atol=0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(own)


def test_clipping_in_odd_orders():
    for order in (("value", "norm"), ("norm", "norm"), ("norm", "value"), ("value", "value")):
        first, second = pair("SGD", {"lr": 1.0})
        values, _ = gradients(torch.Generator().manual_seed(2), random.Random(2), 0.0)
        set_gradients([first[0], second[0]], values)
        first[2].scale(torch.ones(()))
        second[2].scale(torch.ones(()))
        second[2].unscale_(second[1])
        for number, kind in enumerate(order):
            limit = 0.05 / (number + 1)
            if kind == "norm":
                norm = first[2].clip_grad_norm_(first[1], limit)
                expected = torch.nn.utils.clip_grad_norm_(second[0], limit)
                torch.testing.assert_close(norm, expected)
            else:
                first[2].clip_grad_value_(first[1], limit)
                torch.nn.utils.clip_grad_value_(second[0], limit)
        for _, optimizer, scaler in (first, second):
            scaler.step(optimizer)
            scaler.update()
        assert_close(first, second)


def test_unscaling_after_a_folded_clip_shows_gradients_that_are_clipped():
    first, second = pair("SGD", {"lr": 1.0})
    values, _ = gradients(torch.Generator().manual_seed(2), random.Random(2), 0.0)
    set_gradients([first[0], second[0]], values)
    parameters, optimizer, scaler = first
    scaler.scale(torch.ones(()))
    scaler.clip_grad_norm_(optimizer, 0.1)
    torch.testing.assert_close(parameters[0].grad, values[0])
    scaler.unscale_(optimizer)
    second[2].scale(torch.ones(()))
    second[2].unscale_(second[1])
    torch.nn.utils.clip_grad_norm_(second[0], 0.1)
    for own, torchs in zip(first[0], second[0], strict=True):
        torch.testing.assert_close(own.grad, torchs.grad)
    for _, optimizer, scaler in (first, second):
        scaler.step(optimizer)
        scaler.update()
    assert_close(first, second)


def test_gradients_edited_after_a_folded_clip_are_checked_again():
    parameters, optimizer, scaler = pair("SGD", {"lr": 1.0})[0]
    before = copy.deepcopy(parameters)
    set_gradients([parameters], [torch.ones(shape) for shape in SHAPES])
    scaler.scale(torch.ones(()))
    scaler.clip_grad_norm_(optimizer, 0.1)
    parameters[0].grad[0, 0] = float("nan")
    scaler.step(optimizer)
    assert scaler.step_was_skipped
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    case=st.sampled_from(CASES),
    unscale=st.booleans(),
    max_norm=st.none() | st.floats(0.01, 100.0),
    clip_value=st.none() | st.floats(0.001, 10.0),
    keep=st.booleans(),
    bad=st.lists(st.booleans(), min_size=1, max_size=6),
    none=st.integers(0, len(SHAPES)),
)
def test_any_combination_of_options_is_torchs(case, unscale, max_norm, clip_value, keep, bad, none):
    name, options = case
    first, second = pair(name, options, keep_scaled_grads=keep)
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    for overflow in bad:
        values, _ = gradients(generator, rng, float(overflow))
        values = [None if i == none else value for i, value in enumerate(values)]
        set_gradients([first[0], second[0]], values)
        for parameters, optimizer, scaler in (first, second):
            mine = scaler is first[2]
            scaler.scale(torch.ones(()))
            if unscale or not mine:
                scaler.unscale_(optimizer)
            if max_norm is not None:
                if mine:
                    scaler.clip_grad_norm_(optimizer, max_norm)
                else:
                    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            if clip_value is not None:
                if mine:
                    scaler.clip_grad_value_(optimizer, clip_value)
                else:
                    torch.nn.utils.clip_grad_value_(parameters, clip_value)
            scaler.step(optimizer)
            scaler.update()
        for left, right in zip(first[0], second[0], strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
        assert first[2].state_dict() == second[2].state_dict()
