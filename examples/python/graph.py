# SPDX-License-Identifier: Apache-2.0
"""A graph network with a sparse adjacency and an FFT, in a 16-bit region.

    python examples/python/graph.py

Without the preset "supported", torch refuses the sparse product: it has no 16-bit kernel for it.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import fastamp

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=60)
options = parser.parse_args()
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
NODES, SIGNAL = 200, 48

# A ring whose nodes have signals of one of two frequencies; neighbours are alike.
labels = (torch.arange(NODES) // 50 % 2).to(device)
time = torch.linspace(0, 6.283, SIGNAL, device=device)
signals = torch.sin(time * (3 + 4 * labels)[:, None]) + torch.randn(NODES, SIGNAL, device=device)
ring = torch.eye(NODES).roll(1, 0) + torch.eye(NODES).roll(-1, 0) + torch.eye(NODES)
adjacency = (ring / 3).to_sparse_csr().to(device)


class Network(nn.Module):
    """Two layers over the spectrum of each node's signal."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.first = nn.Linear(SIGNAL // 2 + 1, 32)
        self.second = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits for each node."""
        x = torch.fft.rfft(x).abs()  # float32: cuFFT takes no bfloat16
        x = (adjacency @ self.first(x)).relu()  # float32: the adjacency is sparse
        return adjacency @ self.second(x)  # the linear layers run in bfloat16


fastamp.policies.preset("supported")
model = Network().to(device)
optimizer = fastamp.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(options.steps):
    optimizer.zero_grad()
    with fastamp.autocast(device, dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(signals), labels)
    loss.backward()
    optimizer.step()
with torch.no_grad(), fastamp.autocast(device, dtype=torch.bfloat16):
    accuracy = (model(signals).argmax(1) == labels).float().mean().item()
print(f"accuracy {accuracy:.1%}")
