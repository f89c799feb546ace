# SPDX-License-Identifier: Apache-2.0
"""Sharpness-aware minimization in float16: two passes per step, one scaler.

    python examples/python/sam.py
    python examples/python/sam.py --rho 0        # plain AdamW
    python examples/python/sam.py --lbfgs        # many passes per step

Needs scikit-learn.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import fastamp

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--rho", type=float, default=0.05, help="how far uphill the first pass goes")
parser.add_argument("--lbfgs", action="store_true", help="a few steps of LBFGS instead")
options = parser.parse_args()
torch.manual_seed(0)

device = "cuda" if torch.cuda.is_available() else "cpu"
pixels, digits = load_digits(return_X_y=True)
x = torch.tensor(pixels, dtype=torch.float32, device=device) / 16
y = torch.tensor(digits, device=device)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
parameters = list(model.parameters())
scaler = fastamp.GradScaler(device)


def backward(batch: torch.Tensor) -> torch.Tensor:
    """Makes gradients of a scaled loss."""
    optimizer.zero_grad()
    with fastamp.autocast(device, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
    scaler.scale(loss).backward()
    return loss


if options.lbfgs:
    optimizer: torch.optim.Optimizer = torch.optim.LBFGS(parameters, max_iter=10)
    everything = torch.arange(len(x), device=device)

    def closure() -> torch.Tensor:
        """One pass of a step."""
        with scaler.pass_(optimizer):  # leaves gradients without the scale, 0 if they overflowed
            return backward(everything)

    for _ in range(max(1, options.steps // 20)):
        optimizer.step(closure)
        scaler.update()
else:
    optimizer = fastamp.optim.AdamW(parameters, lr=2e-3)
    for _ in range(options.steps):
        batch = torch.randint(len(x), (64,), device=device)
        if options.rho > 0:
            with scaler.pass_(optimizer):
                backward(batch)
            with torch.no_grad():
                before = [p.clone() for p in parameters]
                uphill = [p.grad for p in parameters if p.grad is not None]
                norm = torch.nn.utils.get_total_norm(uphill) + 1e-12
                torch._foreach_add_(parameters, torch._foreach_mul(uphill, options.rho / norm))
        backward(batch)
        if options.rho > 0:
            with torch.no_grad():
                torch._foreach_copy_(parameters, before)
        scaler.step(optimizer)  # is skipped if one of the passes has overflowed
        scaler.update()

skipped = sum(record.skipped for record in scaler.history())
with torch.no_grad():
    accuracy = (model(x).argmax(1) == y).float().mean().item()
print(f"accuracy {accuracy:.1%}, {skipped} of the last {len(scaler.history())} steps skipped")
