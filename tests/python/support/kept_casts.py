# SPDX-License-Identifier: Apache-2.0
"""Uses of kept casts, as tests see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fastamp


def use(weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Sums of the weight's columns, in a region of its own."""
    with fastamp.autocast("cpu", dtype=dtype):
        return torch.mm(torch.ones(1, len(weight), dtype=dtype), weight)


def casts_of(run: Callable[[], Any]) -> tuple[int, int]:
    """Casts made by ``run``, and uses of kept ones."""
    with fastamp.debug.trace() as t:
        run()
    return t.totals["weight_casts"] + t.totals["other_casts"], t.totals["kept_hits"]
