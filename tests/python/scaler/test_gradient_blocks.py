# SPDX-License-Identifier: Apache-2.0
"""Collecting gradients in blocks and handing their addresses to the kernel changes no result."""

import copy
import random
import types

import pytest
import torch

import fastamp
from support.gradient_lists import gradients, unscale
from support.scaler_pairs import SCALERS

# Blocks are of 32 parameters.
COUNTS = (0, 1, 31, 32, 33, 64, 65, 100)
DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float64)
SHAPES = ((16,), (), (0,), (3, 5), (2047,), (2048,), (4500,))


class Asked(torch.nn.Parameter):
    """A parameter that is no plain one: its gradient is read through Python."""


def dense(draw, dtype):
    return torch.randn(draw.choice(SHAPES), dtype=torch.float64).to(dtype)


GRADIENTS = {
    "none": lambda _draw, _dtype: None,
    "dense": dense,
    "transposed": lambda _draw, dtype: torch.randn(5, 7).to(dtype).t(),
    "strided": lambda _draw, dtype: torch.randn(6, 8).to(dtype)[1:, ::2],
    "view": lambda draw, dtype: torch.randn(50).to(dtype)[draw.randrange(40) :],
    "sparse": lambda _draw, dtype: torch.sparse_coo_tensor(
        [[0, 2, 2]], torch.randn(3).to(dtype), (4,)
    ),
}
WEIGHTS = (2, 20, 3, 2, 2, 1)


def random_optimizer(seed, count):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    parameters = []
    for _ in range(count):
        kind = draw.choices(list(GRADIENTS), WEIGHTS)[0]
        gradient = GRADIENTS[kind](draw, draw.choice(DTYPES))
        subclass = draw.random() < 0.03
        shape = (2,) if gradient is None else gradient.shape
        dtype = torch.float32 if gradient is None else gradient.dtype
        parameter = (Asked if subclass else torch.nn.Parameter)(torch.zeros(shape, dtype=dtype))
        parameter.grad = gradient
        parameters.append(parameter)
    if count and draw.random() < 0.4:
        victim = draw.choice(parameters).grad
        if victim is not None and victim.layout is torch.strided and victim.numel():
            victim[(0,) * victim.dim()] = draw.choice([float("inf"), float("nan")])
    cut = draw.randrange(count + 1)
    groups = [{"params": parameters[:cut]}, {"params": parameters[cut:]}]
    return types.SimpleNamespace(param_groups=groups)


def same(left, right):
    if left is None or right is None:
        return left is right
    if left.layout is not torch.strided:
        left, right = left._values(), right._values()
    return left.stride() == right.stride() and torch.equal(
        left.nan_to_num(nan=7.0), right.nan_to_num(nan=7.0)
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("seed", range(6))
def test_any_list_of_gradients_is_unscaled_as_by_torch(seed, count):
    optimizers = [random_optimizer(1000 * seed + count, count) for _ in SCALERS]
    (_, flags, bumps), (_, torch_flags, _) = (
        unscale(kind, optimizer)
        for kind, optimizer in zip(
            (fastamp.GradScaler, torch.amp.GradScaler), optimizers, strict=True
        )
    )
    assert flags == torch_flags
    of_fastamp, torchs = (gradients(optimizer) for optimizer in optimizers)
    assert all(same(a, b) for a, b in zip(of_fastamp, torchs, strict=True))
    assert all(bump in (None, 1) for bump in bumps)


@pytest.mark.parametrize("seed", range(20))
def test_norm_and_counts_are_those_of_the_gradients(seed):
    optimizer = random_optimizer(seed, 70)
    for group in optimizer.param_groups:  # Sums of sparse duplicates are no sums of their squares.
        group["params"] = [p for p in group["params"] if p.grad is None or not p.grad.is_sparse]
    before = copy.deepcopy(gradients(optimizer))
    scaler, flags, _ = unscale(fastamp.GradScaler, optimizer)
    wide = [g.double() for g in before if g is not None]
    if not flags["cpu"]:
        expected = torch.stack([(g / 1024).norm() for g in wide]).norm().float()
        scaler.update()
        assert scaler.history()[-1].norm == pytest.approx(expected.item(), rel=1e-6)
    else:
        bad = {g.index: [g.inf, g.nan] for g in scaler.overflow_report().gradients}
        expected = {
            i: [int(g.isinf().sum()), int(g.isnan().sum())]
            for i, g in enumerate(before)
            if g is not None and not g.isfinite().all()
        }
        assert bad == expected
