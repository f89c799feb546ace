# SPDX-License-Identifier: Apache-2.0
"""A bfloat16 training that meets bad data: a NaN in a batch, and labels that make a spike.

    python examples/python/guarded.py
    python examples/python/guarded.py --no-guard

Needs scikit-learn.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import fastamp

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--no-guard", action="store_true", help="to see what becomes of the model")
options = parser.parse_args()
torch.manual_seed(0)

device = "cuda" if torch.cuda.is_available() else "cpu"
pixels, digits = load_digits(return_X_y=True)
x = torch.tensor(pixels, dtype=torch.float32, device=device) / 16
y = torch.tensor(digits, device=device)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
model.to(device)
optimizer = fastamp.optim.AdamW(model.parameters(), lr=2e-3)
guard = None
if not options.no_guard:
    guard = fastamp.StepGuard(
        optimizer, skip="spike", spike_factor=5.0, max_consecutive=10, named_parameters=model
    )

for step in range(options.steps):
    batch = torch.randint(len(x), (64,), device=device)
    inputs = x[batch]
    if step == 100:
        inputs = inputs.clone()
        inputs[3, 5] = float("nan")
    elif step == 150:
        inputs = inputs * 1000
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs), y[batch])
    loss.backward()
    optimizer.step()

if guard is not None:
    skipped = [record.step for record in guard.history() if record.skipped]
    print(f"of the last {len(guard.history())} steps skipped: {skipped}")
with torch.no_grad():
    accuracy = (model(x).argmax(1) == y).float().mean().item()
print(f"accuracy {accuracy:.1%}")
