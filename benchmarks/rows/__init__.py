"""The rows, a module for each subject; each has ``rows(device)``."""

from __future__ import annotations

import torch

from benchmarks.harness import Row
from benchmarks.rows import ops, regions, scaler, training


def all_rows() -> list[Row]:
    """Returns every row that this machine can run, in table order."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    rows = regions.rows()
    for module in (ops, scaler, training):
        for device in devices:
            rows += module.rows(device)
    return rows
