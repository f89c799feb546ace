# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of a long context in bfloat16, and what the policy "positions" makes of them.

python examples/python/long_context.py
python examples/python/long_context.py --length 32768
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import fastamp

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--length", type=int, default=4096)
options = parser.parse_args()
torch.manual_seed(0)
WIDTH, HEADS = 64, 2
device = "cuda" if torch.cuda.is_available() else "cpu"


class Rotary(nn.Module):
    """Angles of positions, as cosines and sines."""

    def __init__(self) -> None:
        """Makes the frequencies."""
        super().__init__()
        size = WIDTH // HEADS
        self.register_buffer("inv_freq", 1e4 ** (-torch.arange(0, size, 2).float() / size))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the table."""
        angles = positions.float()[:, None] @ self.inv_freq[None]  # in a region, 16 bits
        return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Causal attention over turned queries and keys."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.rotary = Rotary()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what each position attends to."""
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        cos, sin = self.rotary(torch.arange(len(x), device=x.device))

        def turn(t: torch.Tensor) -> torch.Tensor:
            a, b = t.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

        return nn.functional.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)


model = Attention().to(device)
x = torch.randn(options.length, WIDTH, device=device)
positions = torch.arange(options.length, device=device)
exact = model.rotary(positions)[0]


def error() -> float:
    """Returns how far cosines are off in a region."""
    with torch.no_grad(), fastamp.autocast(device, dtype=torch.bfloat16):
        model(x)
        return float((model.rotary(positions)[0].float() - exact).abs().max())


print(f"cosines of {options.length} positions in bfloat16: wrong by up to {error():.2g}")
with fastamp.policies.for_modules(model, {"*": "positions"}) as policies:
    print(f'"positions" found {policies.names["*"]}: wrong by up to {error():.2g}')
