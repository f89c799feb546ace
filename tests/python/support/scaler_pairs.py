# SPDX-License-Identifier: Apache-2.0
"""Runs a program on torch.amp's scaler and on fastamp's, and compares all that they keep."""

import copy

import torch

import fastamp

SCALERS = (torch.amp.GradScaler, fastamp.GradScaler)


def bits(tensor):
    """Bits of a float32 tensor, so that NaN equals NaN and -0 differs from 0."""
    return tensor.detach().contiguous().view(torch.int32).tolist()


def snapshot(scaler, optimizers=()):
    """Everything a scaler keeps, in a form that can be compared with ==."""
    states = {}
    for position, optimizer in enumerate(optimizers):
        if id(optimizer) in scaler._per_optimizer_states:
            state = scaler._per_optimizer_states[id(optimizer)]
            flags = {str(d): f.item() for d, f in state["found_inf_per_device"].items()}
            states[position] = (state["stage"], flags)
    return (
        scaler.state_dict(),
        None if scaler._scale is None else bits(scaler._scale),
        None if scaler._growth_tracker is None else scaler._growth_tracker.item(),
        len(scaler._per_optimizer_states),
        states,
    )


def outcome(call, *arguments):
    """What a call did: ("returned", value) or ("raised", exception type)."""
    try:
        return "returned", call(*arguments)
    except Exception as error:
        return "raised", type(error)


def twin_parameters(shapes, seed, dtype=torch.float32):
    """Two lists of equal parameters."""
    generator = torch.Generator().manual_seed(seed)
    first = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [
        [torch.nn.Parameter(tensor) for tensor in copy.deepcopy(first)] for _ in range(len(SCALERS))
    ]


def set_gradients(twins, values):
    """Gives both lists equal gradients; None removes one."""
    for parameters in twins:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = None if value is None else value.clone()
