# SPDX-License-Identifier: Apache-2.0
"""Gradients to be clipped by torch and by fastamp."""

import math

import torch

import fastamp
from support.scaler_pairs import set_gradients, twin_parameters

SHAPES = ((7, 5), (3,), (), (0,), (64, 33))


torch_clip = torch.nn.utils.clip_grad_norm_


ULPS = 8  # torch sums fp32 squares in fp32; fastamp's are summed in fp64.


def near(left, right, dtype=torch.float32):
    if math.isnan(right) or math.isinf(right):
        return str(left) == str(right)
    return abs(left - right) <= ULPS * torch.finfo(dtype).eps * max(abs(left), abs(right))


def twins_with_gradients(seed=0, dtype=torch.float32, factor=1.0):
    twins = twin_parameters(SHAPES, seed, dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    values = [torch.randn(shape, generator=generator).mul(factor).to(dtype) for shape in SHAPES]
    set_gradients(twins, values)
    return twins


def assert_gradients_near(own, torchs):
    for left, right in zip(own, torchs, strict=True):
        assert (left.grad is None) == (right.grad is None)
        if left.grad is not None:
            eps = ULPS * torch.finfo(left.dtype).eps
            torch.testing.assert_close(left.grad, right.grad, rtol=eps, atol=0, equal_nan=True)


def unscaled(parameters, scale=4.0, groups=None):
    optimizer = torch.optim.SGD(groups or parameters, lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    return scaler, optimizer
