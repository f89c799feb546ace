# SPDX-License-Identifier: Apache-2.0
"""Histories of overflows against torch.amp.GradScaler: everything equal, bit for bit."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.scaler_pairs import SCALERS, bits, outcome, set_gradients, snapshot, twin_parameters

BAD = (float("inf"), float("-inf"), float("nan"))
SHAPES = ((3,), (2, 2), (), (0,), (17,))


def make(options, seed=0, optimizers=2):
    twins = twin_parameters(SHAPES * optimizers, seed)
    size = len(SHAPES)
    sets = [
        [torch.optim.SGD(p[i * size : (i + 1) * size], lr=0.1) for i in range(optimizers)]
        for p in twins
    ]
    return [kind("cpu", **options) for kind in SCALERS], twins, sets


def random_gradients(rng, generator, count, bad_chance):
    values = []
    for shape in SHAPES * count:
        value = torch.randn(shape, generator=generator) * 10 ** rng.uniform(-6, 6)
        if value.numel() and rng.random() < bad_chance:
            value.view(-1)[rng.randrange(value.numel())] = rng.choice(BAD)
        values.append(None if rng.random() < 0.2 else value)
    return values


def compare(scalers, twins, sets):
    assert snapshot(scalers[0], sets[0]) == snapshot(scalers[1], sets[1])
    for own, torchs in zip(*twins, strict=True):
        assert bits(own) == bits(torchs)
        assert (own.grad is None) == (torchs.grad is None)
        if own.grad is not None:
            assert bits(own.grad) == bits(torchs.grad)


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_leave_equal_parameters_gradients_scale_and_states(seed):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    options = {
        "init_scale": rng.choice([2.0**16, 1.0, 3.7, 2.0**126, 1e-30]),
        "growth_factor": rng.choice([2.0, 1.5, 1.0001]),
        "backoff_factor": rng.choice([0.5, 0.9, 1 / 3]),
        "growth_interval": rng.choice([1, 2, 5]),
    }
    scalers, twins, sets = make(options, seed)
    losses = [torch.ones(()) for _ in SCALERS]
    for _ in range(60):
        assert bits(scalers[0].scale(losses[0])) == bits(scalers[1].scale(losses[1]))
        values = random_gradients(rng, generator, 2, rng.choice([0.0, 0.02, 0.3]))
        set_gradients(twins, values)
        program = [
            (rng.choice(["unscale_", "step"]), index)
            for index in range(2)
            for _ in range(rng.choice([1, 1, 2]))
        ]
        rng.shuffle(program)
        for name, index in program:
            results = [
                outcome(getattr(s, name), o[index]) for s, o in zip(scalers, sets, strict=True)
            ]
            assert results[0] == results[1], (name, index)
        new_scale = rng.choice([None, None, None, 2.0**10, torch.tensor(5.0)])
        results = [outcome(s.update, new_scale) for s in scalers]
        assert results[0] == results[1]
        compare(scalers, twins, sets)


@settings(max_examples=300, deadline=None)
@given(
    history=st.lists(st.booleans(), max_size=40),
    init_scale=st.floats(min_value=-(2.0**127), max_value=2.0**127, allow_nan=False, width=32),
    growth_factor=st.floats(min_value=1.0, max_value=1e6, exclude_min=True),
    backoff_factor=st.floats(min_value=-1.0, max_value=1.0, exclude_max=True),
    growth_interval=st.integers(min_value=-1, max_value=6),
)
def test_any_history_of_overflows_moves_the_scale_as_torch_does(
    history, init_scale, growth_factor, backoff_factor, growth_interval
):
    scalers = [
        kind("cpu", init_scale, growth_factor, backoff_factor, growth_interval) for kind in SCALERS
    ]
    for scaler in scalers:
        scaler.scale(torch.ones(()))
    for overflow in history:
        for scaler in scalers:
            flag = torch.full((), float(overflow))
            scaler._per_optimizer_states[0]["found_inf_per_device"] = {torch.device("cpu"): flag}
            scaler.update()
        assert snapshot(scalers[0]) == snapshot(scalers[1])


def test_growth_stops_at_the_largest_finite_scale_and_backoff_reaches_zero():
    for factor, overflow, end in ((2.0, 0.0, 2.0**127), (2.0, 1.0, 0.0)):
        scalers = [kind("cpu", 1.0, factor, 0.5, 1) for kind in SCALERS]
        for scaler in scalers:
            scaler.scale(torch.ones(()))
            for _ in range(200):
                flag = torch.tensor(overflow)
                scaler._per_optimizer_states[1]["found_inf_per_device"] = {flag.device: flag}
                scaler.update()
            assert scaler.get_scale() == end


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_training_a_model_in_fp16_ends_in_equal_weights(optimizer):
    results = []
    for kind in SCALERS:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
        scaler = kind("cpu", init_scale=2.0**20, growth_interval=3)
        inputs, targets = torch.randn(32, 8), torch.randn(32, 1)
        trace = []
        for _ in range(30):
            stepper.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = model(inputs)
            loss = torch.nn.functional.mse_loss(output.float(), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(stepper)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(stepper)
            scaler.update()
            trace.append((scaler.get_scale(), loss.item()))
        results.append((trace, [bits(p) for p in model.parameters()]))
    assert results[0] == results[1]
    assert len({scale for scale, _ in results[0][0]}) > 2  # Both growth and backoff happened.


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(5))
def test_random_histories_are_equal_on_cuda(seed):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    twins = [
        [torch.nn.Parameter(p.detach().cuda()) for p in parameters]
        for parameters in twin_parameters(SHAPES, seed)
    ]
    optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in twins]
    scalers = [kind("cuda", growth_interval=2) for kind in SCALERS]
    for scaler in scalers:
        scaler.scale(torch.ones((), device="cuda"))
    for _ in range(30):
        values = random_gradients(rng, generator, 1, 0.1)
        set_gradients(twins, [None if v is None else v.cuda() for v in values])
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert snapshot(scalers[0]) == snapshot(scalers[1])
        for left, right in zip(*twins, strict=True):
            assert bits(left) == bits(right)
