# SPDX-License-Identifier: Apache-2.0
"""Drawing of a trace; imported only when asked for, since matplotlib is no dependency."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = {
    "weight_casts": "weights cast",
    "other_casts": "others cast",
    "cache_hits": "cache hits",
    "activation_hits": "activation hits",
    "kept_hits": "kept hits",
}


def draw(ops: list[tuple[str, dict[str, int]]], path: str | os.PathLike[str] | None) -> Figure:
    """Bars per op: casts made and avoided on the left, their size on the right."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "trace.plot: expected matplotlib to be installed, got none: pip install matplotlib"
        ) from error
    # A Figure of its own, not pyplot: no window system, no global state.
    figure = Figure(figsize=(11, 1.5 + 0.3 * max(len(ops), 4)), layout="constrained")
    counts, sizes = figure.subplots(1, 2, sharey=True)
    names = [op for op, _ in ops]
    left = [0] * len(ops)
    for kind, label in _KINDS.items():
        widths = [sums[kind] for _, sums in ops]
        counts.barh(names, widths, left=left, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    counts.set_xlabel("casts made and avoided")
    counts.legend()
    counts.invert_yaxis()
    sizes.barh(names, [sums["cast_bytes"] / 2**20 for _, sums in ops])
    sizes.set_xlabel("size of casts made [MiB]")
    if path is not None:
        figure.savefig(os.fspath(path))
    return figure
