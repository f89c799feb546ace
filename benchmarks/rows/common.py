"""What the rows share: swapping the autocast kernels, and regions that stay open for a block."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

import fastamp
from benchmarks.harness import BASELINE, OURS, Candidate

REGIONS: dict[str, Any] = {BASELINE: torch.autocast, OURS: fastamp.autocast}
SCALERS: dict[str, Any] = {BASELINE: torch.amp.GradScaler, OURS: fastamp.GradScaler}


def own_optimizers() -> Any:
    """Returns the module ``fastamp.optim``, None where the installed fastamp has none."""
    try:
        return importlib.import_module("fastamp.optim")
    except ModuleNotFoundError:
        return None


def use_kernels_of(name: str) -> Callable[[], None]:
    """Returns the hook that puts torch's or our autocast kernels in place."""
    hook: Callable[[], None] = fastamp._C.uninstall if name == BASELINE else fastamp._C.install
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
        fastamp._C.install()

    return Candidate(statement, names, before, after)
