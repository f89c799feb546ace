# SPDX-License-Identifier: Apache-2.0
"""Training with and without weight copies, seen step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

import fastamp
from support.small_models import MODELS

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **k: fastamp.optim.SGD(p, lr=0.05, **k),
    "momentum": lambda p, **k: fastamp.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, **k),
    "Adam": lambda p, **k: fastamp.optim.Adam(p, lr=0.01, amsgrad=True, **k),
    "AdamW": lambda p, **k: fastamp.optim.AdamW(p, lr=0.01, **k),
    "fuse_": lambda p, **k: fastamp.optim.fuse_(torch.optim.AdamW(p, lr=0.01), **k),
}


@dataclass
class Run:
    """What a training run left: everything seen, and casts of weights per step."""

    seen: list[torch.Tensor] = field(default_factory=list)
    weight_casts: list[int] = field(default_factory=list)


class Training:
    """A model, an optimizer and a scaler, stepped on fixed data."""

    def __init__(
        self,
        name: str,
        optimizer: str,
        dtype: torch.dtype,
        autocast_dtype: torch.dtype | None,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        self.model = MODELS[name]().to(device)
        self.optimizer = OPTIMIZERS[optimizer](
            self.model.parameters(), autocast_dtype=autocast_dtype
        )
        self.scaler = fastamp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
        self.device, self.dtype = device, dtype
        self.run = Run()
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(5, 6, 8, generator=generator).to(device)
        self.target = torch.randint(4, (5,), generator=generator).to(device)

    def forward(self) -> torch.Tensor:
        with fastamp.autocast(self.device, dtype=self.dtype):
            out = self.model(self.x)
            self.run.seen.append(out.detach().clone())
            return torch.nn.functional.cross_entropy(out, self.target)

    def step(self, *, overflows: bool = False, micro_steps: int = 1) -> None:
        with fastamp.debug.trace() as t:
            for _ in range(micro_steps):
                self.scaler.scale(self.forward()).backward()
        self.run.weight_casts.append(t.totals["weight_casts"])
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if overflows:
            parameters[0].grad.view(-1)[0] = torch.inf
        self.run.seen += [p.grad.clone() for p in parameters]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def steps(self, count: int, overflow: Collection[int] = (), micro_steps: int = 1) -> Run:
        for step in range(count):
            self.step(overflows=step in overflow, micro_steps=micro_steps)
        return self.finish()

    def finish(self) -> Run:
        state: Any = self.optimizer.state_dict()["state"]
        self.run.seen += [p.detach().clone() for p in self.model.parameters()]
        for entry in state.values():
            self.run.seen += [v.clone() for v in entry.values() if isinstance(v, torch.Tensor)]
        return self.run


def assert_same_run(own: Run, torchs: Run) -> None:
    assert len(own.seen) == len(torchs.seen)
    for a, b in zip(own.seen, torchs.seen, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
