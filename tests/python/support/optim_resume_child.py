# SPDX-License-Identifier: Apache-2.0
"""Trains and writes a checkpoint after every step, until it is killed. Run by test_resume.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import fastamp
import fastamp.optim


def make(name, dtype, *, scaled):
    """Model, optimizer, scheduler and scaler; the scaler is disabled unless ``scaled``."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model.to(getattr(torch, dtype))
    options = {"lr": 0.05, "momentum": 0.9, "nesterov": True} if name == "SGD" else {"lr": 0.01}
    optimizer = getattr(fastamp.optim, name)(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    scaler = fastamp.GradScaler(
        "cpu", init_scale=2.0**8, growth_interval=2, hysteresis=2, enabled=scaled
    )
    return model, optimizer, scheduler, scaler


def train_step(model, optimizer, scheduler, scaler, step):
    """One iteration; with a scaler, gradients overflow in some of them, the first one included."""
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 6, generator=generator).to(dtype)
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).float().square().mean()
    scaler.scale(loss).backward()
    if scaler.is_enabled() and step % 7 in (0, 3, 4):
        model[0].bias.grad[step % 8] = float("inf")
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    scaler.update()
    if not scaler.step_was_skipped:
        scheduler.step()


def save(path, step, *parts):
    """Complete or not at all: the old file stays until the new one is there."""
    temporary = path.with_suffix(".new")
    torch.save([step, *(part.state_dict() for part in parts)], temporary)
    temporary.replace(path)


def load(path, *parts):
    step, *states = torch.load(path, weights_only=False)
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    return step


def main(name, dtype, scaled, folder):
    parts = make(name, dtype, scaled=scaled == "scaled")
    for step in range(10_000):
        train_step(*parts, step)
        save(Path(folder) / "checkpoint.pt", step + 1, *parts)
        print(step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
