# SPDX-License-Identifier: Apache-2.0
"""Pairs of (parameters, optimizer, scaler): fastamp's and torch's."""

import torch

import fastamp
import fastamp.optim
from support.scaler_pairs import set_gradients, twin_parameters

SHAPES = ((5, 3), (7,), (), (0,), (40, 9))


BAD = (float("inf"), float("-inf"), float("nan"))


OPTIONS = {
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}],
    "Adam": [{"lr": 0.01}, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}],
    "AdamW": [{"lr": 0.01, "weight_decay": 0.1}],
}


CASES = [(name, options) for name, sets in OPTIONS.items() for options in sets]


def supports_amp_step(optimizer) -> bool:
    """Whether a scaler would hand an optimizer an AmpStep."""
    return getattr(optimizer, "_fastamp_supports_amp_step", False) is True


def pair(name, options, seed=0, **scaler_options):
    """(parameters, optimizer, scaler) of fastamp and of torch's."""
    actual, expected = twin_parameters(SHAPES, seed)
    return (
        (actual, getattr(fastamp.optim, name)(actual, **options),
         fastamp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, **scaler_options)),
        (expected, getattr(torch.optim, name)(expected, **options),
         torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)),
    )  # fmt: skip


def gradients(generator, rng, bad_chance=0.25):
    values = [torch.randn(shape, generator=generator) * 100 for shape in SHAPES]
    bad = rng.random() < bad_chance
    if bad:
        value = rng.choice([v for v in values if v.numel()])
        value.view(-1)[rng.randrange(value.numel())] = rng.choice(BAD)
    return values, bad


def assert_close(first, second, *, grads=True):
    for left, right in zip(first[0], second[0], strict=True):
        torch.testing.assert_close(left, right, rtol=2e-5, atol=2e-7)
        if grads:
            torch.testing.assert_close(left.grad, right.grad, rtol=1e-5, atol=0, equal_nan=True)
    for left, right in zip(first[0], second[0], strict=True):
        mine, torchs = first[1].state.get(left, {}), second[1].state.get(right, {})
        for key, value in torchs.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(
                    mine[key].float(), value.float(), rtol=2e-5, atol=2e-7, check_device=False
                )
    assert first[2].state_dict() == second[2].state_dict()


def step_both(first, second, generator, rng):
    """One iteration of both on equal random gradients; they must agree afterwards."""
    values, _ = gradients(generator, rng)
    set_gradients([first[0], second[0]], values)
    for _, optimizer, scaler in (first, second):
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    assert_close(first, second)
