# SPDX-License-Identifier: Apache-2.0
"""Writes what the digits programs read: scikit-learn's digits and one set of initial weights.

The file is a dictionary of tensors that ``torch.load`` and C++'s ``torch::pickle_load`` read:

- ``x``: float32 (1797, 64), pixels from 0 to 1; ``y``: int64 (1797), the digit
- ``model``: ``fc1.weight`` (256, 64), ``fc1.bias``, ``fc2.weight`` (10, 256), ``fc2.bias``, float32

A file whose name ends in .bin is for programs that read no such dictionary: the number of rows as
int64, then x, y, ``fc1.weight`` and ``fc2.weight``, one after another.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn


def write(path: Path) -> None:
    """Writes the file; the same bytes of data each time (seed 0)."""
    pixels, digits = load_digits(return_X_y=True)
    torch.manual_seed(0)
    layers = {"fc1": nn.Linear(64, 256), "fc2": nn.Linear(256, 10)}
    model = {
        f"{layer}.{name}": parameter.detach()
        for layer, module in layers.items()
        for name, parameter in module.named_parameters()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    x = torch.tensor(pixels, dtype=torch.float32) / 16  # pixels are 0 to 16
    y = torch.tensor(digits, dtype=torch.int64)
    if path.suffix != ".bin":
        torch.save({"x": x, "y": y, "model": model}, path)
        return
    blocks = [torch.tensor(len(y)), x, y, model["fc1.weight"], model["fc2.weight"]]
    path.write_bytes(b"".join(block.numpy().tobytes() for block in blocks))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/data/digits.py FILE")
    write(Path(sys.argv[1]))
