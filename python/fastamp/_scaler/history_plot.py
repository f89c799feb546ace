# SPDX-License-Identifier: Apache-2.0
"""Drawing of a scaler's history; matplotlib is imported only when asked for."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_history"]


def plot_history(scaler: Any, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draws the last iterations of a gradient scaler: its scale, skipped steps, gradient norms.

    Args:
        scaler: A ``fastamp.GradScaler``; of its ``history()``, which waits for the device.
        path: Image file to write; the format follows its name.

    Returns:
        The matplotlib figure.

    Raises:
        TypeError: ``scaler`` has no history.
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    if not hasattr(scaler, "history"):
        raise TypeError(f"plot_history: expected a fastamp.GradScaler, got {type(scaler).__name__}")
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError(
            "plot_history: expected matplotlib to be installed, got none: pip install matplotlib"
        ) from error
    rows = scaler.history()
    known = [row for row in rows if math.isfinite(row.norm)]
    skipped = [row for row in rows if row.skipped]
    # A Figure of its own, not pyplot: no window system, no global state.
    figure = Figure(figsize=(9, 5.5 if known else 3.5), layout="constrained")
    axes = figure.subplots(2 if known else 1, 1, sharex=True, squeeze=False)[:, 0]
    scale = axes[0]
    scale.step([row.step for row in rows], [row.scale for row in rows], where="post", label="scale")
    scale.plot(
        [row.step for row in skipped],
        [row.scale for row in skipped],
        "x",
        color="tab:red",
        label=f"skipped ({len(skipped)} of {len(rows)})",
    )
    if rows and all(row.scale > 0 for row in rows):
        scale.set_yscale("log", base=2)
    scale.set_ylabel("loss scale")
    scale.legend()
    if known:
        axes[1].plot([row.step for row in known], [row.norm for row in known], ".-")
        if all(row.norm > 0 for row in known):
            axes[1].set_yscale("log")
        axes[1].set_ylabel("norm of unscaled gradients")
    axes[-1].set_xlabel("iteration")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    if path is not None:
        figure.savefig(os.fspath(path))
    return figure
