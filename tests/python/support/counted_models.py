# SPDX-License-Identifier: Apache-2.0
"""The wiring of well-known models, made narrow: casts depend on the wiring alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention


class BasicBlock(nn.Module):
    """The residual block of ResNet-18."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.shortcut = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


def resnet18() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 4, 7, 2, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inside = 4
    for outside, stride in ((4, 1), (8, 2), (16, 2), (32, 2)):
        layers += [BasicBlock(inside, outside, stride), BasicBlock(outside, outside, 1)]
        inside = outside
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*layers), torch.randn(2, 3, 32, 32)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


class BertLayer(nn.Module):
    """Separate query, key and value; norms after the residual sums."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        attended = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = self.norm1(x + self.out(attended))
        return self.norm2(x + self.down(gelu(self.up(x))))


class Bert(nn.Module):
    """Twelve layers over summed embeddings, and a pooled classifier."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(30, width), nn.Embedding(8, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(BertLayer(width) for _ in range(12)))
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(tokens) + self.positions.weight)
        return self.classifier(torch.tanh(self.pooler(self.layers(x)[:, 0])))


class Gpt2Layer(nn.Module):
    """One projection for query, key and value; norms before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(part) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """Twelve layers; the embedding is the head too."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(30, width), nn.Embedding(8, width)
        self.layers = nn.Sequential(*(Gpt2Layer(width) for _ in range(12)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.words(tokens) + self.positions.weight)
        return linear(self.norm(x), self.words.weight)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    return nn.Sequential(*layers), torch.randn(2, 16)


def tokens() -> torch.Tensor:
    return torch.randint(30, (2, 8))


#: Model and input by name.
COUNTED: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "MLP": mlp,
    "ResNet-18": resnet18,
    "BERT": lambda: (Bert(), tokens()),
    "GPT-2": lambda: (Gpt2(), tokens()),
}
