# SPDX-License-Identifier: Apache-2.0
"""Small models that use weights and activations in all the ways that casts could get wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.autocast_state import TORCH_LOSES_GRADIENTS


class Block(nn.Module):
    """A transformer block; query, key and value from one projection or from three."""

    def __init__(self, width: int = 8, *, fused: bool, recompute: bool | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections = nn.ModuleList(
            [nn.Linear(width, 3 * width)] if fused else [nn.Linear(width, width) for _ in range(3)]
        )
        self.out = nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.recompute = recompute

    def body(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        parts = [projection(h) for projection in self.projections]
        q, k, v = parts if len(parts) == 3 else parts[0].chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.recompute)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def transformer(*, fused: bool, recompute: bool | None = None) -> nn.Module:
    blocks = [Block(fused=fused, recompute=recompute) for _ in range(2)]
    return nn.Sequential(nn.Linear(8, 8), *blocks, Mean(), nn.Linear(8, 4))


class Tied(nn.Module):
    """One weight used forwards, transposed, in part and through a module that occurs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(8, 8) / 4)
        self.shared = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.head.weight = nn.Parameter(torch.randn(4, 8) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.embedding
        h = torch.tanh(self.shared(h)) + self.shared(h)
        h = h @ self.embedding.t() + nn.functional.linear(h, self.embedding)
        h = torch.cat([h @ self.embedding[:, :4], h @ self.embedding[4:].t()], dim=-1)
        return self.head(h.mean(1)) + nn.functional.linear(h[:, 0], self.head.weight)


class Edits(nn.Module):
    """Writes activations in place, between uses of them and of views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).float()
        a = self.second(h)
        h = h.clone()
        h += 1
        h[:, 0].mul_(2)
        b = self.second(h) + self.third(h.view(-1, 8)).view(h.shape)
        b = nn.functional.relu(b, inplace=True)
        half = h.transpose(0, 1).transpose(0, 1)
        return self.head((a + b + self.third(half)).mean(1))


class Recurrent(nn.Module):
    """An LSTM or GRU that reads a sequence; the last state decides."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 4))


#: Each takes [batch, 6, 8] float32 and gives [batch, 4].
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "separate qkv": lambda: transformer(fused=False),
    "fused qkv": lambda: transformer(fused=True),
    "separate qkv, reentrant checkpoint": lambda: transformer(fused=False, recompute=True),
    "separate qkv, checkpoint": lambda: transformer(fused=False, recompute=False),
    "fused qkv, checkpoint": lambda: transformer(fused=True, recompute=False),
    "tied": Tied,
    "edits": Edits,
}


def train_step(
    model: nn.Module, region: object, x: torch.Tensor, target: torch.Tensor
) -> list[torch.Tensor]:
    """Output, loss and gradients of one step, an evaluation without grad mode before it."""
    model.zero_grad()
    with region:  # type: ignore[attr-defined]
        with torch.no_grad():
            evaluated = model(x)
        if TORCH_LOSES_GRADIENTS and type(region) is torch.autocast:
            torch.clear_autocast_cache()
        out = model(x)
        loss = nn.functional.cross_entropy(out, target)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [evaluated, out.detach(), loss.detach(), *gradients]
