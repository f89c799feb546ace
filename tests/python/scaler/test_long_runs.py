# SPDX-License-Identifier: Apache-2.0
"""Four hundred random steps of each fused optimizer against torch.amp and torch.optim."""

from __future__ import annotations

import random

import pytest
import torch

import fastamp
import fastamp.optim
from support.amp_reference import assert_same_bits
from support.fused_steps import TORCH_FUSES, assert_same_step

SHAPES = ((5, 3), (), (0,), (40, 9))
STEPS = 400
BAD = (float("inf"), float("-inf"), float("nan"))
CASES = {
    "SGD": ("SGD", {"lr": 0.01}),
    "SGD, all options": (
        "SGD",
        {"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01, "maximize": True},
    ),
    "SGD, nesterov": ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "Adam": ("Adam", {"lr": 0.01}),
    "Adam, all options": (
        "Adam",
        {"lr": 0.01, "betas": (0.8, 0.9), "amsgrad": True, "weight_decay": 0.1, "maximize": True},
    ),
    "AdamW": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW, amsgrad": ("AdamW", {"lr": 0.01, "eps": 1e-3, "amsgrad": True}),
}


class Side:
    """Parameters, their optimizer and a scaler: fastamp's, or torch's."""

    def __init__(self, optimizers, scaler, name, options, values):
        self.params = [torch.nn.Parameter(value.clone()) for value in values]
        self.optimizer = getattr(optimizers, name)(self.params, **options)
        # A growth about every fifth step, as overflows come: the scale wanders, and stays in range.
        self.scaler = scaler("cpu", init_scale=2.0**12, growth_interval=3)

    def step(self, gradients, clip):
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient
        self.scaler.scale(torch.ones(()))
        clip(self)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def weights(self):
        """The fp32 weights; of 16-bit parameters, their masters."""
        state = self.optimizer.state
        return [state[p].get("master_param", p).detach().float() for p in self.params]


def draw(rng, generator, scale, dtype):
    """Scaled gradients, some of them absent, and now and then one that is not finite."""
    values = [
        (torch.randn(shape, generator=generator) * rng.choice([1e-3, 1.0]) * scale).to(dtype)
        for shape in SHAPES
    ]
    if rng.random() < 0.17:
        value = values[rng.choice([0, 1, 3])]
        value.view(-1)[rng.randrange(value.numel())] = rng.choice(BAD)
    return [None if i and rng.random() < 0.1 else value for i, value in enumerate(values)]


def no_clip(_side):
    pass


def clip_norm(side):
    if isinstance(side.scaler, fastamp.GradScaler):
        side.scaler.clip_grad_norm_(side.optimizer, 1.0)
    else:
        side.scaler.unscale_(side.optimizer)
        torch.nn.utils.clip_grad_norm_(side.params, 1.0)


def assert_close_weights(got, expected, before, slack):
    """Within 4 units in the last place of the larger of the weights before and after."""
    size = torch.maximum(expected.abs(), before.abs())
    bound = 2.0**-21 * size * (1 if TORCH_FUSES else 8) + slack
    assert ((got - expected).abs() <= bound).all()


def assert_same_state(own, torchs, clip):
    """Moments and step counts: equal, or near where gradients were clipped by nearly equal norms.

    Squares only add up, so that they keep their relative precision. First moments may cancel; the
    clipped gradients that they sum are at most 1.
    """
    for param, other in zip(own.params, torchs.params, strict=True):
        mine, wanted = own.optimizer.state.get(param, {}), torchs.optimizer.state.get(other, {})
        for key, value in wanted.items():
            if value is None:
                continue
            if clip is no_clip or key == "step":
                assert_same_step(mine[key], value)
            else:
                atol = 0.0 if key.endswith("_sq") else 2.0**-21
                torch.testing.assert_close(mine[key], value, rtol=2.0**-19, atol=atol)


RUNS = [(case, torch.float32, clip) for case in CASES for clip in (no_clip, clip_norm)]
RUNS += [
    (case, dtype, clip)
    for case in ("SGD, all options", "Adam, all options", "AdamW")
    for dtype, clip in ((torch.bfloat16, no_clip), (torch.float16, clip_norm))
]


@pytest.mark.parametrize(("case", "dtype", "clip"), RUNS)
def test_four_hundred_random_steps_with_overflows_are_torchs(case, dtype, clip):
    """torch's side has fp32 weights, which 16-bit parameters of fastamp have as masters."""
    name, options = CASES[case]
    rng, generator = random.Random(case), torch.Generator().manual_seed(7)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    own = Side(fastamp.optim, fastamp.GradScaler, name, options, values)
    torchs = Side(
        torch.optim, torch.amp.GradScaler, name, options, [value.float() for value in values]
    )
    exact = name == "SGD" and clip is no_clip
    # The norms may differ by 3 units in the last place, and with them the updates, of about lr.
    slack = 0.0 if clip is no_clip else 2.0**-20 * options["lr"]
    scales, skips = set(), 0
    for number in range(STEPS):
        scale = torchs.scaler.get_scale()
        gradients = draw(rng, generator, scale, dtype)
        before = [param.detach().clone() for param in torchs.params]
        torchs.step([g if g is None else g.float().clone() for g in gradients], clip)
        own.step(gradients, clip)
        scales.add(scale)
        skipped = torchs.scaler.get_scale() < scale
        skips += skipped
        assert own.scaler.step_was_skipped == skipped
        assert own.scaler.state_dict() == torchs.scaler.state_dict()
        if number % 10 == 9:
            assert_same_state(own, torchs, clip)
        for mine, other, was in zip(own.weights(), torchs.params, before, strict=True):
            if exact or skipped:
                assert_same_step(mine, other.detach())
                continue
            assert_close_weights(mine, other.detach(), was, slack)
            with torch.no_grad():  # Each step is judged on its own.
                other.copy_(mine)
        for param, master, other in zip(own.params, own.weights(), torchs.params, strict=True):
            assert_same_bits(param.detach(), master.to(dtype))
            if clip is no_clip and param.grad is not None:
                assert_same_bits(param.grad, other.grad.to(dtype))
    assert skips > 40
    assert len(scales) > 4
