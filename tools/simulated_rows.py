# SPDX-License-Identifier: Apache-2.0
"""Makes the benchmark's CUDA rows so small that a simulated device can run them.

Used by tools/simulated_gpu.py. Rows keep their names, and their code; what is measured of them
means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
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


def _module(name: str) -> Any:
    """One of benchmarks/."""
    return import_module(f"benchmarks.{name}")


def _with_numbers_up_to(most: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, given no larger numbers."""

    def called(*arguments: Any, **options: Any) -> Any:
        small = [min(a, most) if type(a) is int else a for a in arguments]
        return function(*small, **options)

    return called


def _replace(owner: Any, **values: Any) -> None:
    """Replaces names of a module or class."""
    for name, value in values.items():
        assert hasattr(owner, name)
        setattr(owner, name, value)


def _replace_everywhere(**values: Any) -> None:
    """Replaces names in all modules of rows that have them."""
    for module in (_module(f"rows.{each}") for each in ROWS):
        _replace(module, **{name: v for name, v in values.items() if hasattr(module, name)})


def _small_workloads() -> Callable[[str], list[Any]]:
    """The models of a GPU by name, those of a CPU in size."""
    models = _module("models")

    def kind(workload: Any) -> str:
        return str(workload.name)[:4]

    # Of two of a kind, the first has fewer layers.
    small = {kind(workload): workload for workload in reversed(models.workloads("cpu"))}
    made = [
        replace(small[kind(large)], name=large.name, steps=1) for large in models.workloads("cuda")
    ]
    return lambda device: made if device == "cuda" else models.workloads(device)


def _shrink_lists() -> None:
    layouts, muon = _module("rows.layouts"), _module("rows.muon")
    scaler, steps = _module("rows.scaler"), _module("rows.steps")

    def make_gradients(device: str, count: int, elements: int) -> Any:
        return scaler_gradients(device, min(count, COUNT), min(elements, ELEMENTS))

    def large(device: str, name: str, shapes: Callable[[], list[tuple[int, ...]]]) -> Any:
        small = [tuple(min(size, SIDE) for size in shape) for shape in shapes()[:COUNT]]
        return steps_large(device, name, lambda: small)

    scaler_gradients, steps_large = scaler.make_gradients, steps._large
    _replace_everywhere(make_gradients=make_gradients)
    _replace(layouts, _parameters=_with_numbers_up_to(ELEMENTS, layouts._parameters))
    _replace(muon, _matrices=_with_numbers_up_to(SIDE, muon._matrices))
    _replace(steps, _large=large)


def _shrink_models() -> None:
    models, float8 = _module("models"), _module("rows.float8")

    def wide_digits(batch: int, width: int, layers: int) -> Any:
        return replace(
            models.wide_digits(batch, SIDE, layers),
            name=models.wide_digits(batch, width, layers).name,
        )

    def gpt2(**sizes: Any) -> Any:
        return models.gpt2(**{**sizes, "n_layer": 2, "n_embd": SIDE, "n_head": 4})

    def text(length: int, masked: bool = False) -> Any:
        return models.text(min(length, 32), masked)

    def llama_block() -> Any:
        return models.transformer(1, SIDE, 4)

    def two_blocks(_: int, *sizes: Any) -> Any:
        return models.transformer(2, *sizes)

    _replace_everywhere(workloads=_small_workloads(), wide_digits=wide_digits, text=text)
    _replace(_module("rows.low_precision_weights"), gpt2=gpt2)
    _replace(_module("rows.training"), transformer=two_blocks)
    _replace(_module("rows.claims"), LIMIT=LIMIT)
    _replace(float8, llama_block=llama_block, Product=_with_numbers_up_to(SIDE, float8.Product))
    one_layer = _with_numbers_up_to(SIDE, float8._step_of_one_layer)
    _replace(float8, _step_of_one_layer=one_layer)


def make_rows_small(tree: Path) -> None:
    """Patches benchmarks/ in this process.

    Args:
        tree: Where results and pages are written, as below the root of the repository.
    """
    environment = _module("environment")  # before what reads its ROOT
    for folder in ("docs/plots", "benchmarks/results"):
        (tree / folder).mkdir(parents=True, exist_ok=True)
    readme = environment.ROOT / "README.md"
    (tree / "README.md").write_text(readme.read_text(encoding="utf-8"), encoding="utf-8")
    environment.ROOT = tree
    run = _module("run")
    _replace(_module("harness"), CALIBRATIONS=1)
    once = _module("budget").Effort(
        repeats=REPEATS,
        block_seconds=0.0,
        promised_repeats=REPEATS,
        least_repeats=REPEATS,
        quick=True,
    )

    def base(_: Any) -> Any:
        return once

    def limit(_: Any) -> float:
        return float("inf")

    _replace(run.Plan, base=base, limit=limit)
    _shrink_lists()
    _shrink_models()
