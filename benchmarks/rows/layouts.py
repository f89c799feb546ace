# SPDX-License-Identifier: Apache-2.0
"""The step of AdamW by what is stored: moments, masters and their rounding."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.harness import BASELINE, FASTAMP, Candidate, Row
from benchmarks.rows.scaler import make_gradients, make_scaler, weight_of
from benchmarks.sides import own_optimizers

GROUP = "Optimizer steps by layout"
STEP = "scaler.step(optimizer); scaler.update()"
# All candidates are there at once: 10 GB on a GPU, of 90M parameters.
LARGE = {"cpu": (20, 600_000), "cuda": (150, 600_000)}
ROW = 64
NARROW = {"state_dtype": torch.bfloat16}
CODES = {"state_dtype": "8bit"}
# Name, dtype of the parameters and their gradients, options.
LAYOUTS: tuple[tuple[str, torch.dtype, dict[str, Any]], ...] = (
    (FASTAMP, torch.float32, {}),
    ("bf16 moments to nearest", torch.float32, {**NARROW, "state_rounding": "nearest"}),
    ("bf16 moments", torch.float32, NARROW),
    ("8-bit moments", torch.float32, CODES),
    ("bf16 parameters", torch.bfloat16, {}),
    ("bf16 parameters, remainders", torch.bfloat16, {"master": "remainder"}),
    (
        "bf16 parameters, remainders, bf16 moments",
        torch.bfloat16,
        {"master": "remainder", **NARROW},
    ),
    (
        "bf16 parameters, remainders, 8-bit moments",
        torch.bfloat16,
        {"master": "remainder", **CODES},
    ),
    ("fp16 parameters, remainders, bf16 moments", torch.float16, {"master": "remainder", **NARROW}),
)


def _parameters(device: str, count: int, elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    found = []
    for made in make_gradients(device, count, elements):
        # Moments in 8 bits are those of matrices.
        shape = (-1, ROW) if elements % ROW == 0 else (-1,)
        parameter = made.detach().to(dtype).view(shape).requires_grad_()
        assert made.grad is not None
        parameter.grad = made.grad.to(dtype).view(shape)
        found.append(parameter)
    return found


def _candidates(device: str, count: int, elements: int) -> dict[str, Candidate]:
    """Returns torch.amp over its fused optimizer with float32, and fastamp with each layout."""
    torchs = torch.optim.AdamW(
        _parameters(device, count, elements, torch.float32), 1e-6, (0.9, 0.99), fused=True
    )
    found = {
        BASELINE: Candidate(STEP, {"scaler": make_scaler(BASELINE, device), "optimizer": torchs})
    }
    for name, dtype, options in LAYOUTS:
        parameters = _parameters(device, count, elements, dtype)
        optimizer = own_optimizers().AdamW(parameters, 1e-6, (0.9, 0.99), **options)
        names = {"scaler": make_scaler(FASTAMP, device), "optimizer": optimizer}
        found[name] = Candidate(STEP, names)
    return found


def rows(device: str) -> list[Row]:
    """Returns the rows of one device."""
    sizes = {"1000 x 16": (1000, 16), f"{LARGE[device][0]} x 600k": LARGE[device]}
    return [
        Row(
            f"{device}: step + update, fastamp's AdamW by layout, {name}",
            partial(_candidates, device, count, elements),
            GROUP,
            device,
            weight=3 * weight_of(count, elements, cheap=500),
        )
        for name, (count, elements) in sizes.items()
    ]
