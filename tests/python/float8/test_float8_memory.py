# SPDX-License-Identifier: Apache-2.0
"""What fp8 saves for backward, beside a bfloat16 region: bytes, and the table of docs/float8.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

import fastamp
from support.float8 import E4M3, float8_region, saved_bytes

BF16, FP32 = torch.bfloat16, torch.float32
DOCS = Path(__file__).resolve().parents[3] / "docs" / "float8.md"
TOKENS = 512


def test_a_linear_saves_exactly_half_of_bf16s_bytes():
    layer = nn.Linear(256, 512)
    x = torch.randn(64, 256, requires_grad=True) * 1.0
    params = list(layer.parameters())
    with fastamp.autocast("cpu", dtype=torch.bfloat16):
        base_dtype = saved_bytes(lambda: layer(x), params)
    with float8_region():
        float8 = saved_bytes(lambda: layer(x), params)
    assert base_dtype == {torch.bfloat16: 2 * (64 * 256 + 512 * 256)}
    # Beside two scales of four bytes.
    assert float8 == {torch.float8_e4m3fn: 64 * 256 + 512 * 256, torch.float32: 8}


class Block(nn.Module):
    """A pre-norm transformer block with fused q, k, v: GPT-2's MLP, or Llama's."""

    def __init__(self, width: int, heads: int, hidden: int, gated: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate = nn.Linear(width, hidden) if gated else None
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        h = nn.functional.gelu(self.up(h)) if self.gate is None else silu(self.gate(h)) * self.up(h)
        return x + self.down(h)


def block_bytes(block: Block, region: fastamp.autocast) -> dict[torch.dtype, int]:
    width = block.out.in_features
    x = torch.randn(1, TOKENS, width, requires_grad=True)
    with region:
        return saved_bytes(lambda: block(x), [*block.parameters()])


def bytes_of_weights(block: Block) -> int:
    """One byte for each element of a matrix."""
    return sum(p.numel() for p in block.parameters() if p.dim() == 2)


@pytest.mark.parametrize(
    ("name", "width", "heads", "hidden", "gated", "most"),
    [
        ("GPT-2 block, 768 wide", 768, 12, 3072, False, 0.70),
        ("SwiGLU block, 1024 wide", 1024, 16, 2816, True, 0.71),
    ],
)
def test_a_block_saves_30_percent_less_as_the_documentation_says(
    name: str, width: int, heads: int, hidden: int, gated: bool, most: float
):
    block = Block(width, heads, hidden, gated)
    base_dtype = block_bytes(block, fastamp.autocast("cpu", dtype=BF16))
    float8 = block_bytes(block, float8_region())
    weights = bytes_of_weights(block)
    before, after = sum(base_dtype.values()), sum(float8.values())
    assert after <= most * before
    # The casts of weights halve exactly; what other ops save does not shrink.
    activations = before - 2 * weights, after - weights
    assert activations[1] > 0.8 * activations[0]
    linears = 4 if not gated else 5
    scales = 2 * linears - (1 if gated else 0)  # gate and up share the cast of their input
    assert float8[FP32] - base_dtype.get(FP32, 0) == scales * 4
    cells = [f"{size / 1e6:.1f}" for size in (before, 2 * weights, activations[0])]
    cells += [f"{size / 1e6:.1f}" for size in (after, weights, activations[1])]
    cells.append(f"-{100 * (1 - after / before):.0f} %")
    (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", DOCS.read_text(), re.MULTILINE)
    assert [cell.strip() for cell in row.split("|")] == cells


def test_what_attention_and_the_linear_after_it_both_save_comes_on_top():
    layer, x = nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)

    def forward() -> torch.Tensor:
        h = torch.sigmoid(x.bfloat16())  # saves its output, which the layer reads
        return layer(h)

    with fastamp.autocast("cpu", dtype=BF16):
        base_dtype = saved_bytes(forward, [*layer.parameters()])
    with float8_region():
        float8 = saved_bytes(forward, [*layer.parameters()])
    assert base_dtype == {BF16: 2 * (32 * 64 + 64 * 64)}  # one storage for both
    assert float8 == {BF16: 2 * 32 * 64, E4M3: 32 * 64 + 64 * 64, FP32: 8}
