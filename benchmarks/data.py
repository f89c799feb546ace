# SPDX-License-Identifier: Apache-2.0
"""Real data that comes with packages: scikit-learn's digits, and the Python reference's text.

Both are split by a fixed rule, and batches come in an order fixed by a seed, so that all candidates
see the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch.nn.functional import interpolate

Batch = tuple[torch.Tensor, torch.Tensor]
# Every fifth image, and the last tenth of the text, are for tests only.
TEST_EVERY, TEST_TEXT = 5, 0.1
MASK_TOKEN, MASKED_SHARE, IGNORED = 256, 0.15, -100


@cache
def _digits() -> Batch:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return images, torch.tensor(labels)


@cache
def _text() -> torch.Tensor:
    """Returns the bytes of the language reference that ``help()`` shows, 0.7 million of them."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def images(size: int, channels: int, test: bool = False) -> Batch:
    """Returns digits scaled to ``size`` x ``size`` pixels, float32 in 0..1, and their labels."""
    pixels, labels = _digits()
    chosen = (torch.arange(len(labels)) % TEST_EVERY == 0) == test
    pixels = pixels[chosen]
    if size != 8:
        pixels = interpolate(pixels, size=(size, size), mode="bilinear")
    return pixels.expand(-1, channels, -1, -1), labels[chosen]


def image_batches(size: int, channels: int, batch: int, device: str) -> Iterator[Batch]:
    """Yields batches of training images for ever, shuffled anew for each epoch."""
    pixels, labels = images(size, channels)
    generator = torch.Generator().manual_seed(0)
    queue = torch.empty(0, dtype=torch.long)
    while True:
        while len(queue) < batch:
            queue = torch.cat([queue, torch.randperm(len(labels), generator=generator)])
        chosen, queue = queue[:batch], queue[batch:]
        yield pixels[chosen].contiguous().to(device), labels[chosen].to(device)


def _windows(length: int, batch: int, test: bool, seed: int) -> Iterator[torch.Tensor]:
    text = _text()
    border = int(len(text) * (1 - TEST_TEXT))
    part = text[border:] if test else text[:border]
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(part) - length, (batch, 1), generator=generator)
        yield part[starts + torch.arange(length)]


def text_batches(
    length: int, batch: int, device: str, test: bool = False, seed: int = 1
) -> Iterator[Batch]:
    """Yields (bytes, the bytes that follow them) of shape (batch, length)."""
    for window in _windows(length + 1, batch, test, seed):
        yield window[:, :-1].contiguous().to(device), window[:, 1:].contiguous().to(device)


def masked_batches(length: int, batch: int, device: str, test: bool = False) -> Iterator[Batch]:
    """Yields (bytes of which 15 % are masked, the masked ones and elsewhere -100)."""
    generator = torch.Generator().manual_seed(2)
    for window in _windows(length, batch, test, seed=3):
        masked = torch.rand(window.shape, generator=generator) < MASKED_SHARE
        masked[:, 0] = True  # no batch without any
        yield (
            window.masked_fill(masked, MASK_TOKEN).to(device),
            window.masked_fill(~masked, IGNORED).to(device),
        )
