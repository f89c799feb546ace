# SPDX-License-Identifier: Apache-2.0
"""Makes the benchmark's CUDA rows so small that a simulated device can run them.

Used by tools/simulated_gpu.py. Rows keep their names, and their code; what is measured of them
means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

ROWS = (
    "clip",
    "claims",
    "float8",
    "inference",
    "kernels",
    "layouts",
    "low_precision_weights",
    "muon",
    "scaler",
    "steps",
    "training",
    "weight_copies",
)
SIDE = 64  # of matrices
ELEMENTS = 600  # of a tensor in a list
COUNT = 300  # of tensors in a list
REPEATS = 2  # quartiles need two
LIMIT = 48 << 20  # bytes, in the search for the largest batch


def _with_numbers_up_to(most: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, told no larger numbers."""

    def called(*arguments: Any, **options: Any) -> Any:
        small = [min(a, most) if type(a) is int else a for a in arguments]
        return function(*small, **options)

    return called


def _set_everywhere(name: str, value: Any) -> None:
    """Replaces a name in all modules of rows that have it."""
    for module in (import_module(f"benchmarks.rows.{each}") for each in ROWS):
        if hasattr(module, name):
            setattr(module, name, value)


def _small_workloads() -> Callable[[str], list[Any]]:
    """The models of a GPU by name, those of a CPU in size."""
    from benchmarks import models

    def kind(workload: Any) -> str:
        return str(workload.name)[:4]

    small = {kind(workload): workload for workload in models.workloads("cpu")}
    made = [
        replace(small[kind(large)], name=large.name, steps=1) for large in models.workloads("cuda")
    ]
    return lambda device: made if device == "cuda" else models.workloads(device)


def _shrink_lists() -> None:
    from benchmarks.rows import layouts, muon, scaler, steps

    def make_gradients(device: str, count: int, elements: int) -> Any:
        return scaler_gradients(device, min(count, COUNT), min(elements, ELEMENTS))

    scaler_gradients = scaler.make_gradients
    _set_everywhere("make_gradients", make_gradients)
    _set_everywhere("_parameters", _with_numbers_up_to(ELEMENTS, layouts._parameters))
    muon._matrices = _with_numbers_up_to(SIDE, muon._matrices)  # type: ignore[assignment]
    steps.LARGE = (COUNT, ELEMENTS)
    shapes = steps.transformer_shapes
    steps.transformer_shapes = lambda blocks, width, tables: shapes(2, 8, [8 for _ in tables])


def _shrink_models() -> None:
    from benchmarks import models
    from benchmarks.rows import claims, float8, low_precision_weights

    def wide_digits(batch: int, width: int, layers: int) -> Any:
        return replace(
            models.wide_digits(batch, SIDE, layers),
            name=models.wide_digits(batch, width, layers).name,
        )

    def gpt2(**sizes: Any) -> Any:
        return models.gpt2(**{**sizes, "n_layer": 2, "n_embd": SIDE, "n_head": 4})

    def text(length: int, masked: bool = False) -> Any:
        return models.text(min(length, 32), masked)

    _set_everywhere("workloads", _small_workloads())
    _set_everywhere("wide_digits", wide_digits)
    _set_everywhere("text", text)
    low_precision_weights.gpt2 = gpt2
    claims.LIMIT = LIMIT
    float8.llama_block = lambda: models.transformer(1, SIDE, 4)
    real = float8.Product
    float8.Product = _with_numbers_up_to(SIDE, real)  # type: ignore[assignment,misc]
    one_layer = _with_numbers_up_to(SIDE, float8._step_of_one_layer)
    float8._step_of_one_layer = one_layer


def make_rows_small(tree: Path) -> None:
    """Patches benchmarks/ in this process.

    Args:
        tree: Where results and pages are written, as below the root of the repository.
    """
    from benchmarks import budget, environment

    for folder in ("docs/plots", "benchmarks/results"):
        (tree / folder).mkdir(parents=True, exist_ok=True)
    readme = environment.ROOT / "README.md"
    (tree / "README.md").write_text(readme.read_text(encoding="utf-8"), encoding="utf-8")
    environment.ROOT = tree
    from benchmarks import harness, run

    harness.CALIBRATIONS = 1
    once = budget.Effort(
        repeats=REPEATS,
        block_seconds=0.0,
        promised_repeats=REPEATS,
        least_repeats=REPEATS,
        quick=True,
    )
    run.Plan.base = lambda plan: once  # type: ignore[method-assign]
    run.Plan.limit = lambda plan: float("inf")  # type: ignore[method-assign]
    _shrink_lists()
    _shrink_models()
