# SPDX-License-Identifier: Apache-2.0
"""A trace as an HTML page."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastamp._debug.report import Section, cards_of, page, table_of, today
from fastamp._debug.trace.trace_rows import TraceRow
from fastamp._debug.watch.origins import short_path
from fastamp._util.aligned_text import size_text

__all__ = ["page_of"]


def page_of(rows: Sequence[TraceRow], totals: Mapping[str, int], scaler_lines: list[str]) -> str:
    """Returns the page; the lines on gradient scalers are shown below the totals."""
    hits = sum(totals[name] for name in ("cache_hits", "activation_hits", "kept_hits"))
    cards = [
        (str(totals["calls"]), "op calls"),
        (str(totals["weight_casts"] + totals["other_casts"]), "casts made"),
        (size_text(totals["cast_bytes"]), "of casts made"),
        (str(hits), "casts avoided"),
        (str(totals["gradient_casts"]), "gradients cast back"),
    ]
    scalers = "".join(f"<p>{html.escape(line)}</p>" for line in scaler_lines)
    what = html.escape(f"fastamp trace of {Path(sys.argv[0]).name or 'a session'}, {today()}")
    head = f"<h1>What autocast did</h1><p>{what}</p>{cards_of(cards)}{scalers}"
    return page(what, [head, table_of(_section_of(rows))])


def _section_of(rows: Sequence[TraceRow]) -> Section:
    ordered = sorted(rows, key=lambda row: (-row.cast_bytes, row.op, row.source))
    return Section(
        "Ops",
        "calls that autocast's kernels handled; the largest casts first",
        (
            "Op",
            "Device",
            "Policy",
            "Input dtypes",
            "Runs in",
            "In fp8",
            "Module",
            "Source",
            "Calls>",
            "Weight casts>",
            "Other casts>",
            "Cast bytes>",
            "Cache hits>",
            "Activation hits>",
            "Kept hits>",
        ),
        [
            (
                row.op,
                row.device,
                row.policy,
                ", ".join(row.inputs),
                row.run_dtype,
                row.float8,
                row.module,
                short_path(row.source),
                *map(str, (row.calls, row.weight_casts, row.other_casts, row.cast_bytes)),
                *map(str, (row.cache_hits, row.activation_hits, row.kept_hits)),
            )
            for row in ordered
        ],
    )
