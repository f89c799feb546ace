# SPDX-License-Identifier: Apache-2.0
"""The step of Muon, beside torch's, which steps one matrix after the other."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.harness import BASELINE, FASTAMP, Candidate, Row
from benchmarks.rows.scaler import make_scaler
from benchmarks.sides import own_optimizers

GROUP = "Optimizer steps"
STEP = "scaler.step(optimizer); scaler.update()"
COUNT = 24


def _matrices(device: str, side: int) -> list[torch.Tensor]:
    """Returns square parameters that have gradients, as the blocks of a transformer do."""
    found = []
    for _ in range(COUNT):
        parameter = torch.zeros(side, side, device=device, requires_grad=True)
        parameter.grad = torch.randn_like(parameter)
        found.append(parameter)
    return found


def _candidates(device: str, side: int) -> dict[str, Candidate]:
    makers = {BASELINE: torch.optim.Muon, FASTAMP: own_optimizers().Muon}
    return {
        name: Candidate(
            STEP,
            {
                "scaler": make_scaler(name, device),
                "optimizer": make(_matrices(device, side), lr=1e-6),
            },
        )
        for name, make in makers.items()
    }


def rows(device: str) -> list[Row]:
    """Returns the rows of one device: square matrices of two sizes."""
    sides = (256, 768) if device == "cuda" else (64, 256)
    return [
        Row(
            f"{device}: step + update, fastamp's Muon, {COUNT} x {side}x{side}",
            partial(_candidates, device, side),
            GROUP,
            device,
            weight=1 + 4 * side / 256,
        )
        for side in sides
    ]
