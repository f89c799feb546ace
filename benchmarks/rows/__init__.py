# SPDX-License-Identifier: Apache-2.0
"""The rows, a module for each subject; each has ``rows(device)``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import Row
from benchmarks.rows import (
    claims,
    clip,
    float8,
    inference,
    kernels,
    layouts,
    low_precision_weights,
    muon,
    ops,
    opt_in,
    regions,
    scaler,
    steps,
    training,
    weight_copies,
)
from benchmarks.traffic import beside_a_copy


def all_rows(devices: Sequence[str]) -> list[Row]:
    """Returns every row of these devices, in table order; tensors are made when they are run."""
    rows = regions.rows() if "cpu" in devices else []
    for module in (
        ops,
        kernels,
        scaler,
        clip,
        steps,
        opt_in,
        layouts,
        muon,
        training,
        low_precision_weights,
        weight_copies,
        float8,
        inference,
        claims,
    ):
        for device in devices:
            rows += map(beside_a_copy, module.rows(device))
    return rows
