# SPDX-License-Identifier: Apache-2.0
"""Models at inference: converted, in a region over float32 weights, and in float32."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import fastamp
from benchmarks.goals import at_least_times
from benchmarks.harness import BASELINE, FASTAMP, Candidate, Facts, Row
from benchmarks.models import Workload, wide_digits, workloads
from benchmarks.sides import use_kernels_of

GROUP = "Inference"
FP32 = "float32"
DTYPE = torch.bfloat16
BATCHES = (1, 32)
MEBI = 2**20
# The models' names begin so.
MODELS = ("ResNet-18", "ViT", "GPT-2")


def _model(which: str, workload: Workload, device: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    with torch.device(device):
        model = workload.model().eval()
    x, _ = next(workload.batches(workload.batch, device, False))
    if which == FASTAMP:
        use_kernels_of(FASTAMP)()
        model = fastamp.inference.convert(
            model, DTYPE, example_inputs=x, inplace=True, verbose=False
        )
    return model, x


def _call(which: str, workload: Workload, device: str) -> Callable[[], Any]:
    model, x = _model(which, workload, device)

    def call() -> Any:
        with torch.no_grad(), torch.autocast(device, dtype=DTYPE, enabled=which == BASELINE):
            return model(x)

    return call


def _candidates(workload: Workload, device: str) -> dict[str, Candidate]:
    found = {}
    for which in (BASELINE, FASTAMP, FP32):
        kernels = use_kernels_of(FASTAMP if which == FP32 else which)
        call = _call(which, workload, device)
        found[which] = Candidate("call()", {"call": call}, before=kernels)
    return found


def _facts(workload: Workload, device: str, quick: bool) -> Facts:
    del quick  # one call either way
    found: Facts = {}
    for which in (BASELINE, FASTAMP, FP32):
        model, x = _model(which, workload, device)
        size = sum(parameter.nbytes for parameter in model.parameters())
        with (
            torch.no_grad(),
            fastamp.autocast(device, dtype=DTYPE, enabled=which == BASELINE),
            fastamp.debug.trace() as trace,
        ):
            model(x)
        casts = trace.totals["weight_casts"]
        found[which] = {"MiB of weights": size / MEBI, "weight casts": casts}
        del model
        gc.collect()
    return found


def inference_row(workload: Workload, device: str) -> Row:
    """Returns the row of a workload."""
    name = workload.name.partition(", batch")[0]
    return Row(
        f"{device}: inference: {name}, batch {workload.batch}, bf16",
        partial(_candidates, workload, device),
        GROUP,
        device,
        goal=at_least_times(1.0),
        work=(workload.batch * workload.units, workload.unit),
        facts=partial(_facts, workload, device),
        weight=2.0,
    )


def rows(device: str) -> list[Row]:
    """Returns the rows of one device."""
    models = [w for begin in MODELS for w in workloads(device) if w.name.startswith(begin)]
    found = [wide_digits(batch, 1024, 4) for batch in BATCHES]
    found += [workload.of_batch(batch) for workload in models for batch in BATCHES]
    return [inference_row(workload, device) for workload in found]
