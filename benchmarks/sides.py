# SPDX-License-Identifier: Apache-2.0
"""The two sides of a row: torch.amp and fastamp, their classes and their autocast kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

import fastamp
from benchmarks.harness import BASELINE, FASTAMP, Candidate

REGIONS: dict[str, Any] = {BASELINE: torch.autocast, FASTAMP: fastamp.autocast}
SCALERS: dict[str, Any] = {BASELINE: torch.amp.GradScaler, FASTAMP: fastamp.GradScaler}


def own_optimizers() -> Any:
    """Returns the module ``fastamp.optim``.

    Raises:
        ImportError: The fastamp that is installed has none.
    """
    return importlib.import_module("fastamp.optim")


def use_kernels_of(name: str) -> Callable[[], None]:
    """Returns the hook that puts torch's or our autocast kernels in place."""
    hook: Callable[[], None] = (
        fastamp._C.unregister_kernels if name == BASELINE else fastamp._C.register_kernels
    )
    return hook


def inside_region(
    name: str, device: str, dtype: torch.dtype, statement: str, names: dict[str, Any]
) -> Candidate:
    """Returns a candidate whose blocks run inside one open region, with the kernels of ``name``."""
    region = REGIONS[name](device, dtype=dtype)

    def before() -> None:
        use_kernels_of(name)()
        region.__enter__()

    def after() -> None:
        region.__exit__(None, None, None)
        fastamp._C.register_kernels()

    return Candidate(statement, names, before, after)
