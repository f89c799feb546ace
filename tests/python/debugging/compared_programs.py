# SPDX-License-Identifier: Apache-2.0
"""A small transformer that trains a step, right or with one of some faults, and is recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

import fastamp
from fastamp._debug.compare.record import Record
from fastamp._debug.compare.recorded_step import RecordedStep
from fastamp._debug.watch.model_names import ModelNames
from fastamp._util.tool_guard import ToolGuard

#: What is wrong, and a part of the line that has to name it.
FAULTS = {
    "a weight of other initial values": "parameter up.weight",
    "another sample in the batch": "embedding in embed, forward, call 0: input",
    "another activation": "only the second run calls silu in Model, forward",
    "dropout left on": "in drop, forward",  # As an op that the first run has not.
    "another eps of a norm": "native_layer_norm in norm, forward",
    "attention without its scale": "in attend",
    "attention that sees the future": "in attend",
    "a loss that is summed": "in no module, forward",
    "labels that are shifted": "in no module",
    "a branch that is detached": "backward",
    "gradients that are clipped while scaled": "the step's update of",
    "a learning rate twice as high": "the step's update of",
    "weight decay of a bias": "the step's update of",
    "an inf in one module": "in up, forward, call 0: input 1 has inf or NaN in one run only",
}


class Attend(torch.nn.Module):
    def __init__(self, width: int, fault: str) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)
        if self.fault != "attention without its scale":
            scores = scores / x.shape[-1] ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.fault != "attention that sees the future":
            scores = scores.masked_fill(~mask, -1e4)
        return self.out(scores.softmax(-1) @ v)


class Model(torch.nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        width = 32
        self.embed = torch.nn.Embedding(50, width)
        self.attend = Attend(width, fault)
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 64)
        self.drop = torch.nn.Dropout(0.2)
        self.down = torch.nn.Linear(64, width)
        self.head = torch.nn.Linear(width, 50)
        self.fault = fault
        if fault == "a weight of other initial values":
            with torch.no_grad():
                self.up.weight.mul_(1.05)
        if fault == "another eps of a norm":
            self.norm.eps = 0.1
        self.drop.train(fault == "dropout left on")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.attend(x)
        branch = self.norm(x)
        if self.fault == "a branch that is detached":
            branch = branch.detach()
        if self.fault == "an inf in one module":
            branch = branch * 1e30 * 1e30
        h = self.up(branch)
        h = functional.gelu(h) if self.fault != "another activation" else functional.silu(h)
        return self.head(x + self.down(self.drop(h)))


def recorded(
    fault: str = "",
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    foreach: bool = False,
    sgd: bool = False,
) -> Record:
    """One step of the program; in a region of a dtype if one is given."""
    assert not fault or fault in FAULTS
    torch.manual_seed(0)
    model = Model(fault)
    groups: Any = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    if fault == "weight decay of a bias":
        groups = [
            {"params": [p for p in model.parameters() if p is not model.head.bias]},
            {"params": [model.head.bias], "weight_decay": 0.5},
        ]
    lr = 2e-3 if fault == "a learning rate twice as high" else 1e-3
    kind: Any = torch.optim.SGD if sgd else torch.optim.Adam
    optimizer = kind(groups, lr=lr, foreach=foreach)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(50, (4, 9), generator=generator)
    if fault == "another sample in the batch":
        tokens[2] = (tokens[2] + 1) % 50
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    if fault == "labels that are shifted":
        labels = tokens[:, :-1]
    scaler = fastamp.GradScaler("cpu", init_scale=scale)
    names, guard = ModelNames([optimizer]), ToolGuard("the test")
    step = RecordedStep([model], [scaler], names, guard, (0, 1), 0)
    with step.watched() as path:
        path.add(model)
        region = torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)
        with region:
            logits = model(inputs).flatten(0, 1).float()
            reduction = "sum" if fault == "a loss that is summed" else "mean"
            loss = functional.cross_entropy(logits, labels.flatten(), reduction=reduction)
        scaler.scale(loss).backward()
        if fault != "gradients that are clipped while scaled":
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert not guard.is_off
    return step.report()
