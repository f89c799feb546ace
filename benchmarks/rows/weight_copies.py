# SPDX-License-Identifier: Apache-2.0
"""Whole training steps whose optimizer writes the casts of weights: fastamp with weight copies.

Beside torch.amp, the same optimizer of fastamp without weight copies shows what they alone bring.
"""

from __future__ import annotations

import gc
from functools import partial

import torch

import fastamp
from benchmarks.counts import MEBI
from benchmarks.goals import both, fewer, none_of
from benchmarks.harness import BASELINE, FASTAMP, Candidate, Facts, Row
from benchmarks.models import Workload, digits, wide_digits, workloads
from benchmarks.training import Training

GROUP = "Training steps with weight copies"
NO_COPIES = "no weight copies"
DTYPE = torch.bfloat16
# Way of training, and whether the optimizer writes weight copies, by candidate.
WAYS = {BASELINE: (BASELINE, False), FASTAMP: (FASTAMP, True), NO_COPIES: (FASTAMP, False)}
# The larger models' names begin so; and the rows' weights.
MODELS = {"tiny transformer": 4.0, "ResNet-18": 11.0, "BERT": 7.0, "GPT-2": 7.0}


def facts_of(workload: Workload, device: str, quick: bool) -> Facts:
    """Counts each way separately, so that its kept casts and memory are its own."""
    del quick  # a few steps either way
    found: Facts = {}
    for name, (which, weight_copies) in WAYS.items():
        training = Training(workload, which, device, DTYPE, weight_copies)
        found[name] = training.counts()
        found[name]["MiB kept between steps"] = fastamp.casts.kept().bytes / MEBI
        if device == "cpu":  # counts frees of older memory or not: three runs, three figures
            del found[name]["MiB peak"]
        del training
        gc.collect()
    return found


def _candidates(workload: Workload, device: str) -> dict[str, Candidate]:
    found = {}
    for name, (which, weight_copies) in WAYS.items():
        training = Training(workload, which, device, DTYPE, weight_copies)
        training.warm_up()
        found[name] = training.candidate()
    return found


def copies_row(workload: Workload, device: str, weight: float = 4.0) -> Row:
    """Returns the row of a workload."""
    return Row(
        f"{device}: weight copies: {workload.name}, bf16",
        partial(_candidates, workload, device),
        GROUP,
        device,
        goal=both(fewer("casts"), none_of("weight casts")),
        work=(workload.batch * workload.units, workload.unit),
        facts=partial(facts_of, workload, device),
        weight=weight,
    )


def rows(device: str) -> list[Row]:
    """Returns the rows of one device."""
    # Of one image, casts of weights are as large a part of a step as they can be.
    found = [copies_row(digits(32), device), copies_row(wide_digits(1, 1024, 4), device)]
    for begin, weight in MODELS.items():
        larger = [work for work in workloads(device) if work.name.startswith(begin)]
        found += [copies_row(work, device, weight) for work in larger]
    return found
