# SPDX-License-Identifier: Apache-2.0
"""Optimizer-like objects with gradients, and what unscaling does to them."""

import types

import torch


def plain_optimizer(count=40):
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 8.0)
    return types.SimpleNamespace(param_groups=[{"params": parameters}])


def gradients(optimizer):
    return [p.grad for group in optimizer.param_groups for p in group["params"]]


def unscale(kind, optimizer, scale=1024.0):
    scaler = kind("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    versions = [None if g is None else g._version for g in gradients(optimizer)]
    scaler.unscale_(optimizer)
    flags = scaler._found_inf_per_device(optimizer)
    bumps = [
        None if g is None or g.layout is not torch.strided else g._version - v
        for g, v in zip(gradients(optimizer), versions, strict=True)
    ]
    return scaler, {str(d): bool(f) for d, f in flags.items()}, bumps
