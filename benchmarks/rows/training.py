# SPDX-License-Identifier: Apache-2.0
"""Whole training steps: all of torch.amp beside all of fastamp, and fp32 beside both."""

from __future__ import annotations

import gc
from functools import partial

import torch
from torch import nn

from benchmarks.goals import at_least_times, both, fewer
from benchmarks.harness import Candidate, Facts, Goal, Row
from benchmarks.models import Workload, digits, text, transformer, workloads
from benchmarks.training import Training, ways

GROUP = "Training steps"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SAVED = "MiB saved for backward"
QUICK_STEPS = 1
FEWER_CASTS = fewer("casts")


def facts_of(workload: Workload, device: str, dtype: torch.dtype, quick: bool) -> Facts:
    """Counts each way of training separately, so that their memory does not mix."""
    steps = min(workload.steps, QUICK_STEPS) if quick else workload.steps
    found: Facts = {}
    for which in ways(device):
        training = Training(workload, which, device, dtype)
        found[which] = training.facts(steps)
        del training
        gc.collect()
    return found


def training_row(
    workload: Workload, device: str, mode: str, goal: Goal, name: str = "", weight: float = 12
) -> Row:
    """Returns the row of a workload in a dtype."""
    dtype = DTYPES[mode]

    def candidates() -> dict[str, Candidate]:
        return {
            which: Training(workload, which, device, dtype).candidate() for which in ways(device)
        }

    return Row(
        name or f"{device}: {workload.name}, {mode}",
        candidates,
        GROUP,
        device,
        goal=goal,
        work=(workload.batch * workload.units, workload.unit),
        facts=partial(facts_of, workload, device, dtype),
        weight=weight,
    )


def _separate_qkv(device: str, activation: type[nn.Module]) -> Row:
    """Twelve blocks in which one activation has three consumers.

    Enough tokens that activations outweigh the casts of weights. ReLU saves one tensor less of a
    block than GELU does, so that the shared casts are a larger part of what is saved.
    """
    work = Workload(
        f"12 blocks, separate q, k, v, {activation.__name__}",
        "tokens",
        lambda: transformer(12, 64, 4, activation),
        text(64),
        8,
        64,
        steps=3,
    )
    return training_row(work, device, "bf16", both(fewer(SAVED, 0.1), FEWER_CASTS))


def rows(device: str) -> list[Row]:
    """Returns the rows of one device."""
    small = both(at_least_times(1.15), FEWER_CASTS) if device == "cpu" else FEWER_CASTS
    found = [training_row(digits(32), device, mode, small) for mode in DTYPES]
    # Without float16 arithmetic, which few CPUs have, it is emulated, a hundred times slower: only
    # the smallest model has a row of it there.
    modes = DTYPES if device == "cuda" else ("bf16",)
    for workload in (digits(1797), *workloads(device)):
        goal = small if workload.name.startswith("tiny") else FEWER_CASTS
        found += [training_row(workload, device, mode, goal) for mode in modes]
    return [*found, _separate_qkv(device, nn.ReLU), _separate_qkv(device, nn.GELU)]
