# SPDX-License-Identifier: Apache-2.0
"""A small GPT on Python's language reference learns in fp8 what it learns in bfloat16."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import fastamp
from support.float8 import float8_region, outcomes

CHARACTERS = 128  # ASCII, and a multiple of 16: the head can run in fp8
WIDTH, LAYERS, HEADS, LENGTH, BATCH = 128, 4, 4, 64, 4
STEPS, WARM_UP, LR = 600, 50, 2e-3
Batch = tuple[torch.Tensor, torch.Tensor]


class Bf16Linear(torch.autograd.Function):
    """What a bfloat16 region computes of a linear layer: float32 sums of bfloat16, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        ctx.dtypes = x.dtype, weight.dtype
        ctx.save_for_backward(x.bfloat16(), weight.bfloat16())
        with torch.autocast("cpu", enabled=False):
            added = None if bias is None else bias.bfloat16().float()
            operands = (saved.float() for saved in ctx.to_save)
            return linear(*operands, added).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = (saved.float() for saved in ctx.saved_tensors)
        flat = grad.float().flatten(0, -2)
        to_x = (grad.float() @ weight).bfloat16().to(ctx.dtypes[0])
        to_weight = (flat.t() @ x.flatten(0, -2)).bfloat16().to(ctx.dtypes[1])
        return to_x, to_weight, flat.sum(0).bfloat16().float() if ctx.needs_input_grad[2] else None


class Bf16Products(TorchFunctionMode):
    """Linear layers as above. CPUs without bfloat16 take up to forty times as long for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear:
            return Bf16Linear.apply(*args, *(None,) * (3 - len(args)))
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.characters(tokens) + self.places.weight[: tokens.shape[1]]
        return self.lm_head(self.norm(self.blocks(x)))


def text() -> torch.Tensor:
    """Python's language reference: docs/ would be other data after each commit."""
    whole = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(whole.encode("ascii", "replace")))


def batch(data: torch.Tensor, generator: torch.Generator) -> Batch:
    starts = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=generator)
    rows = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, tokens: Batch, region: fastamp.autocast) -> torch.Tensor:
    products = Bf16Products() if region.float8 is None else nullcontext()
    with region, products:
        return cross_entropy(model(tokens[0]).flatten(0, 1).float(), tokens[1].flatten())


def validation_loss(seed: int, data: torch.Tensor, region: fastamp.autocast) -> float:
    """Trains and returns the loss on the last tenth of the text, with which no step was taken."""
    split = len(data) * 9 // 10
    torch.manual_seed(seed)
    model = GPT()
    exclusion = fastamp.float8.exclude(model.lm_head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(1000 + seed)
    for step in range(1, STEPS + 1):
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = LR * min(1, step / WARM_UP) * decay
        optimizer.zero_grad()
        loss_of(model, batch(data[:split], generator), region).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    generator.manual_seed(7)
    test = [batch(data[split:], generator) for _ in range(24)]
    with torch.no_grad():
        if region.float8 is not None:
            assert outcomes(lambda: loss_of(model, test[0], region)) == ["", "excluded", "float8"]
        losses = [loss_of(model, tokens, region) for tokens in test]
    exclusion.release()
    return torch.stack(losses).mean().item()


def test_the_products_beside_which_fp8_is_judged_are_those_of_a_bfloat16_region():
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 48), torch.randn(2, 5, 32, requires_grad=True)
    grad = torch.randn(2, 5, 48).bfloat16()
    leaves = [x, *layer.parameters()]
    with fastamp.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x)
        with Bf16Products():
            found = layer(x)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9)
    for a, b in zip(
        torch.autograd.grad(found, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_gpt_ends_within_1_percent_of_bf16s_validation_loss(seed: int):
    assert 0.7e6 < sum(p.numel() for p in GPT().parameters()) < 0.9e6
    data = text()
    assert len(data) > 100_000
    assert int(data.max()) < CHARACTERS
    bf16 = validation_loss(seed, data, fastamp.autocast("cpu", dtype=torch.bfloat16))
    float8 = validation_loss(seed, data, float8_region())
    assert bf16 < 2.8  # well below the 3.3 or so of single letters' frequencies
    assert float8 != bf16
    assert float8 == pytest.approx(bf16, rel=0.01)
