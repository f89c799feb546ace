# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts that writes 16-bit values into a float32 tensor, which torch refuses.

    python examples/python/mixture.py
    python examples/python/mixture.py --compile
    python examples/python/mixture.py --preset torch    # ends with torch's error

Needs scikit-learn.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import fastamp

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--preset", default="unify", help="op policies: unify, or torch for none")
parser.add_argument("--compile", action="store_true")
options = parser.parse_args()
torch.manual_seed(0)


class Mixture(nn.Module):
    """Each row goes through the expert that the router likes best."""

    def __init__(self, width: int, experts: int) -> None:
        """Makes experts of one layer."""
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns float32, as models do that want to keep their residuals exact."""
        weight, chosen = self.router(x).float().softmax(-1).max(-1)
        out = torch.zeros(x.shape, device=x.device)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out.index_add_(0, rows, expert(x[rows]))  # the expert's product is bfloat16
        return x + out * weight[:, None]


device = "cuda" if torch.cuda.is_available() else "cpu"
pixels, digits = load_digits(return_X_y=True)
x = torch.tensor(pixels, dtype=torch.float32, device=device) / 16
y = torch.tensor(digits, device=device)
model = nn.Sequential(Mixture(64, 4), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = fastamp.optim.AdamW(model.parameters(), lr=5e-3)
run = torch.compile(model) if options.compile else model

with fastamp.policies.preset(options.preset), fastamp.debug.trace() as trace:
    for _ in range(options.steps):
        batch = torch.randint(len(x), (128,), device=device)
        with fastamp.autocast(device, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(run(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    accuracy = (model(x).argmax(1) == y).float().mean().item()

cast = {row.op: row.calls for row in trace.rows if row.policy == "unify"}
print(f"accuracy {accuracy:.1%}, calls that were cast: {cast}")
