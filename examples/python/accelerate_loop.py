# SPDX-License-Identifier: Apache-2.0
"""A training loop for Hugging Face's Accelerate that knows nothing of fastamp.

    python -m fastamp examples/python/accelerate_loop.py
    torchrun --nproc-per-node 2 -m fastamp examples/python/accelerate_loop.py

Needs accelerate and scikit-learn.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()
torch.manual_seed(0)

pixels, digits = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits))
accelerator = Accelerator(
    mixed_precision="bf16",
    gradient_accumulation_steps=2,
    cpu=not torch.cuda.is_available(),
)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loader = DataLoader(data, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(options.epochs):
    right = torch.zeros((), device=accelerator.device)
    seen = torch.zeros((), device=accelerator.device)
    for x, y in loader:
        with accelerator.accumulate(model):
            output = model(x)
            accelerator.backward(nn.functional.cross_entropy(output, y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        right += (output.argmax(1) == y).sum()
        seen += len(y)
    share = accelerator.reduce(right) / accelerator.reduce(seen)
    accelerator.print(f"epoch {epoch + 1}: accuracy {share.item():.1%}")
