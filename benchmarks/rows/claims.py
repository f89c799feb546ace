# SPDX-License-Identifier: Apache-2.0
"""What articles and documentation claim for mixed precision, measured; all of it needs a GPU.

The figures of the ViT-Base claim: fp32 8.2 GB and 142 s, AMP 5.1 GB and 98 s, so 38 % less memory
and 1.45x, batch 64 grown to 128, accuracy within 0.3 %. Others: 2 to 3 times as fast on tensor
cores; half the memory for activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.harness import BASELINE, FASTAMP, Facts, Goal, Result, Row
from benchmarks.models import Workload, workloads
from benchmarks.rows.training import DTYPES, SAVED, training_row
from benchmarks.training import FP32, TF32, largest_batch

GROUP = "Claims"
LIMIT = 16 * 2**30
LARGEST = "largest batch in 16 GiB"


def _vit_base(result: Result) -> bool:
    own, fp32 = result.facts[FASTAMP], result.facts[FP32]
    return (
        result.speedup(FP32)[1] >= 1.45
        and own["MiB peak"] <= 0.62 * fp32["MiB peak"]
        and own[LARGEST] >= 2 * fp32[LARGEST]
        and own["accuracy %"] >= fp32["accuracy %"] - 0.3
    )


def _tensor_cores(result: Result) -> bool:
    return result.speedup(FP32)[1] >= 2


def _half_memory(result: Result) -> bool:
    return result.facts[FASTAMP][SAVED] <= 0.55 * result.facts[FP32][SAVED]


def _tf32(result: Result) -> bool:
    return result.speedup(TF32)[1] > 1


def _with_largest_batch(row: Row, workload: Workload, mode: str) -> Row:
    counted = row.facts

    def facts(quick: bool) -> Facts:
        assert counted is not None
        found = counted(quick)
        for which in (FP32, BASELINE, FASTAMP):
            found[which][LARGEST] = largest_batch(workload, which, DTYPES[mode], LIMIT)
        return found

    return replace(row, facts=facts)


@dataclass(frozen=True)
class Claim:
    """Claim: what is said, of which model and dtypes, and the test of it."""

    text: str
    model: str
    modes: tuple[str, ...]
    reached: Callable[[Result], bool]


CLAIMS = [
    Claim(
        "1.45x, 38 % less memory, twice the batch, accuracy within 0.3 % of fp32",
        "ViT-B",
        ("fp16", "bf16"),
        _vit_base,
    ),
    Claim("2 to 3 times as fast as fp32", "BERT", ("fp16",), _tensor_cores),
    Claim("half of fp32's memory for activations", "ResNet-50", ("fp16",), _half_memory),
    Claim("faster than TF32", "GPT-2", ("bf16",), _tf32),
]


def rows(device: str) -> list[Row]:
    """Returns the rows: a GPU's only."""
    if device != "cuda":
        return []
    found = []
    for claim in CLAIMS:
        workload = next(w for w in workloads(device) if w.name.startswith(claim.model))
        for mode in claim.modes:
            name = f"cuda: claim: {claim.model}, {mode}: {claim.text}"
            row = training_row(workload, device, mode, Goal(claim.text, claim.reached), name)
            largest = claim.reached is _vit_base
            found.append(_with_largest_batch(row, workload, mode) if largest else row)
    return [replace(row, group=GROUP) for row in found]
