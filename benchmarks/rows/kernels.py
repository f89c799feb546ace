# SPDX-License-Identifier: Apache-2.0
"""Single CUDA kernels over large lists, beside torch's for the same.

Rows of other modules run two or more kernels in a call. The cast kernel has no row: only regions
call it, in the middle of their work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.harness import BASELINE, FASTAMP, Candidate, Passes, Row
from benchmarks.rows.scaler import LARGE, SCALE, make_gradients, weight_of
from benchmarks.sides import own_optimizers
from benchmarks.traffic import passes, total

GROUP = "Kernels"
STEPS = ("SGD", "AdamW")
TORCH_UNSCALE = "unscale(g, found, inv_scale)"


def _unscale(device: str, count: int, elements: int, *, norm: bool) -> dict[str, Candidate]:
    names = {
        "g": [parameter.grad for parameter in make_gradients(device, count, elements)],
        "found": torch.zeros(1, device=device),
        "inv_scale": torch.full((1,), 1 / SCALE, device=device),
    }
    torchs: dict[str, Any] = {
        **names,
        "unscale": torch._amp_foreach_non_finite_check_and_unscale_,
        "norm": torch.nn.utils.get_total_norm,
    }
    own: dict[str, Any] = {
        **names,
        "unscale": torch.ops.fastamp.unscale_and_check_,
        "squares": torch.zeros(1, device=device, dtype=torch.float64) if norm else None,
    }
    return {
        BASELINE: Candidate(TORCH_UNSCALE + "; norm(g)" * norm, torchs),
        FASTAMP: Candidate("unscale(g, inv_scale, found, sum_of_squares=squares)", own),
    }


def _step(device: str, count: int, elements: int, *, kind: str) -> dict[str, Candidate]:
    torchs = getattr(torch.optim, kind)(make_gradients(device, count, elements), 1e-6, fused=True)
    own = getattr(own_optimizers(), kind)(make_gradients(device, count, elements), 1e-6)
    return {
        BASELINE: Candidate("step()", {"step": torchs.step}),
        FASTAMP: Candidate("step()", {"step": own.step}),
    }


def kernel_rows(device: str, count: int, elements: int, name: str) -> list[Row]:
    """Returns the rows, over ``count`` gradients of so many elements."""
    all_elements = count * elements
    # Without a scaler there is nothing to unscale, and steps leave gradients as they are.
    unwritten = {kind: total(passes(all_elements, kind)) - 4 * all_elements for kind in STEPS}
    kinds: dict[str, tuple[Callable[..., dict[str, Candidate]], Passes]] = {
        "unscale": (partial(_unscale, norm=False), passes(all_elements, "unscale")),
        "unscale with norm": (
            partial(_unscale, norm=True),
            passes(all_elements, "unscale with norm"),
        ),
        **{kind: (partial(_step, kind=kind), [(kind, unwritten[kind])]) for kind in STEPS},
    }
    return [
        Row(
            f"{device}: kernel: {kind}, {name}",
            partial(make, device, count, elements),
            GROUP,
            device,
            bytes_moved=total(done),
            clock="events" if device == "cuda" else "host",
            passes=done,
            weight=weight_of(count, elements),
        )
        for kind, (make, done) in kinds.items()
    ]


def rows(device: str) -> list[Row]:
    """Returns the rows: a GPU's only."""
    return kernel_rows(device, *LARGE, "150 x 600k") if device == "cuda" else []
