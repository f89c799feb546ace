# SPDX-License-Identifier: Apache-2.0
"""A model loaded in float16 in a loop of somebody else's, which unscales and clips.

    python examples/python/fp16_weights.py
    python examples/python/fp16_weights.py --no-masters     # torch's error, which names the way out

Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import fastamp

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--no-masters", action="store_true", help="without fuse_")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
pixels, digits = load_digits(return_X_y=True)
x = torch.tensor(pixels, dtype=torch.float32, device=device) / 16
y = torch.tensor(digits, device=device)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """The loop, as Accelerate, Lightning and the Trainer of transformers have it."""
    torch.manual_seed(1)
    scaler: Any = torch.amp.GradScaler(device)
    for _ in range(options.steps):
        batch = torch.randint(len(x), (64,), device=device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
        return float(nn.functional.cross_entropy(model(x), y))


fastamp.install()  # python -m fastamp does it for a program that is not changed
torch.manual_seed(0)
half = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device).half()
full = copy.deepcopy(half).float()

optimizer = torch.optim.AdamW(half.parameters(), lr=2e-3)
if not options.no_masters:
    fastamp.optim.fuse_(optimizer, widen_grads=True)
print(f"fp16 weights: loss {train(half, optimizer):.4f}")
print(f"fp32 weights: loss {train(full, torch.optim.AdamW(full.parameters(), lr=2e-3)):.4f}")
