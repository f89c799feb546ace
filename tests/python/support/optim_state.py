# SPDX-License-Identifier: Apache-2.0
"""Short trainings whose state is stored, exchanged and compared."""

from __future__ import annotations

import io

import torch

from support.amp_reference import assert_same_bits

OPTIONS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
}
MOMENTS = {
    "SGD": ["momentum_buffer"],
    "Adam": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    "AdamW": ["exp_avg", "exp_avg_sq"],
}


def give_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


def run(optimizer, steps, first=0):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        give_gradients(params, step)
        optimizer.step()
    return params


def same_state(first, second):
    """Compares two optimizers' states, tensor by tensor."""
    for group, other in zip(first.param_groups, second.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            mine, torchs = first.state[p], second.state[q]
            assert mine.keys() == torchs.keys()
            for key in mine:
                assert_same_bits(mine[key], torchs[key])


def saved_and_loaded(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
