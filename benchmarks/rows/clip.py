# SPDX-License-Identifier: Apache-2.0
"""Clipping gradients: torch's functions and fastamp's, alone and after unscale_."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fastamp
from benchmarks.goals import not_slower
from benchmarks.harness import BASELINE, FASTAMP, Candidate, Passes, Row
from benchmarks.rows.scaler import (
    LARGE,
    STEP,
    UNSCALE,
    make_gradients,
    make_scaler,
    weight_of,
)
from benchmarks.sides import own_optimizers
from benchmarks.traffic import passes, total

GROUP = "Clipping"
# The first calls clip gradients of ones to it. From then on the norm is as large at most: torch
# multiplies by 1, and fastamp, which reads as much, writes nothing.
MAX_NORM = 1.0
SIZES = [("10 x 16", 10, 16), ("1000 x 16", 1000, 16), ("150 x 600k", *LARGE)]
CLIPS: dict[str, Any] = {
    BASELINE: torch.nn.utils.clip_grad_norm_,
    FASTAMP: fastamp.clip_grad_norm_,
}


def _norm(device: str, count: int, elements: int) -> dict[str, Candidate]:
    parameters = make_gradients(device, count, elements)
    return {
        which: Candidate(f"clip(p, {MAX_NORM})", {"clip": clip, "p": parameters})
        for which, clip in CLIPS.items()
    }


def _unscale_and_norm(device: str, count: int, elements: int) -> dict[str, Candidate]:
    parameters = make_gradients(device, count, elements)
    optimizer = torch.optim.SGD(parameters, lr=1e-6)
    found = {}
    for which, clip in CLIPS.items():
        names = {"clip": clip, "p": parameters, "optimizer": optimizer}
        names["scaler"] = make_scaler(which, device)
        found[which] = Candidate(f"{UNSCALE}; clip(p, {MAX_NORM})", names)
    return found


def _value_and_step(device: str, count: int, elements: int) -> dict[str, Candidate]:
    parameters = {which: make_gradients(device, count, elements) for which in CLIPS}
    torchs = {
        "scaler": make_scaler(BASELINE, device),
        "optimizer": torch.optim.SGD(parameters[BASELINE], lr=1e-6),
        "clip": torch.nn.utils.clip_grad_value_,
        "p": parameters[BASELINE],
    }
    own = {
        "scaler": make_scaler(FASTAMP, device),
        "optimizer": own_optimizers().SGD(parameters[FASTAMP], lr=1e-6),
    }
    return {
        BASELINE: Candidate(f"scaler.unscale_(optimizer); clip(p, 0.5); {STEP}", torchs),
        FASTAMP: Candidate(f"scaler.clip_grad_value_(optimizer, 0.5); {STEP}", own),
    }


Make = Callable[[str, int, int], dict[str, Candidate]]


def _row(
    device: str, verb: str, make: Make, kernels: Passes, name: str, count: int, elements: int
) -> Row:
    """``kernels``: what they move for one element."""
    large = elements > 16
    done = [(kernel, each * count * elements) for kernel, each in kernels if large]
    on_gpu = device == "cuda"
    return Row(
        f"{device}: {verb}, {name}",
        lambda: make(device, count, elements),
        GROUP,
        device,
        bytes_moved=total(done) if on_gpu else 0,
        passes=done if on_gpu else [],
        clock="events" if on_gpu and large else "host",
        goal=not_slower(),
        weight=2 * weight_of(count, elements),
    )


def rows(device: str) -> list[Row]:
    """Returns the rows of one device."""
    by_one = passes(1, "unscale", written=False)
    verbs: list[tuple[str, Make, Passes]] = [
        ("clip_grad_norm_", _norm, passes(1, "norm") + by_one),
        ("unscale_ + clip_grad_norm_", _unscale_and_norm, passes(1, "unscale with norm") + by_one),
        (
            "clip by value + step + update, fastamp's SGD",
            _value_and_step,
            passes(1, "norm", "SGD"),
        ),
    ]
    return [_row(device, *verb, *size) for verb in verbs for size in SIZES]
