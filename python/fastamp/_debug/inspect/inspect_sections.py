# SPDX-License-Identifier: Apache-2.0
"""The sections of an inspection as titles and rows of text, for the terminal and for the page."""

from __future__ import annotations

import math

from fastamp._debug.inspect.inspect_rows import OpRow, StepRows, uses_fp16
from fastamp._debug.report import Section
from fastamp._util.tool_guard import ToolGuard

__all__ = ["sections_of"]

_ROWS = 30


def number(value: float | None) -> str:
    """Three digits; a dash for None."""
    return "-" if value is None else f"{value:.3g}"


def percent(share: float | None) -> str:
    """Returns a share from 0 to 1 as text; a dash for None."""
    return "-" if share is None else f"{100 * share:.3g} %"


_ENDS = {
    "float16": "float16 ends at 65504, is subnormal below 6.1e-05 and 0 below 3e-08",
    "bfloat16": "bfloat16 ends at 3.4e+38, is subnormal below 1.2e-38 and 0 below 4.6e-41",
}


def _severity(row: OpRow) -> float:
    error = row.local_error
    return -math.inf if error is None else error


def sections_of(report: StepRows, rows: int = _ROWS) -> list[Section]:
    """Returns all tables of a report, without the empty ones."""
    guard = ToolGuard("a table of fastamp.debug.inspect", "is left out")
    tables = (_ops, _errors, _ranges, _scales, _gradients, _weights)
    found = [guard.run_always(table, report, rows) for table in tables]
    return [section for section in found if section is not None and section.rows]


def _ops(report: StepRows, limit: int) -> Section:
    sums: dict[tuple[str, ...], list[int]] = {}
    for row in report.ops:
        name = f"{row.op} ({row.autocast_op})" if row.autocast_op not in ("", row.op) else row.op
        inputs = ", ".join(dict.fromkeys(row.inputs))
        pass_ = "backward" if row.backward else "forward"
        key = (name, pass_, inputs, row.output, row.reason)
        entry = sums.setdefault(key, [0, 0, 0])
        entry[0] += row.calls
        entry[1] += row.bytes
        entry[2] += row.flops
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    cells = [
        (*key, str(calls), f"{size / 2**20:.2f}", f"{flops / 1e6:.1f}" if flops else "-")
        for key, (calls, size, flops) in ordered
    ]
    return Section(
        "Ops: what ran in which dtype, and why",
        "inherited: 16-bit input, and autocast has no policy for the op",
        ("Op", "Pass", "Inputs", "Output", "Reason", "Calls>", "MiB>", "MFLOP>"),
        cells[:limit],
        max(len(cells) - limit, 0),
    )


def _errors(report: StepRows, limit: int) -> Section:
    low = [row for row in report.ops if row.local_error is not None]
    low.sort(key=_severity, reverse=True)
    cells = [
        (
            row.op,
            row.module or "-",
            "backward" if row.backward else "forward",
            row.output,
            row.reason,
            number(row.local_error),
            # An element of a sum that cancels is far off in its own units, and harmless.
            "-" if row.flops else number(row.local_ulps),
            "-" if row.local_cosine is None else f"{row.local_cosine:.6f}",
            number(row.error),
        )
        for row in low
    ]
    return Section(
        "Errors: each 16-bit op against fp32",
        "local, with the worst element (not of products, whose sums may cancel) and the angle: the "
        "same op in fp32 on the same inputs; in all: if everything ran in fp32",
        ("Op", "Module", "Pass", "Output", "Reason", "Local>", "Ulps>", "Cosine>", "In all>"),
        cells[:limit],
        max(len(cells) - limit, 0),
    )


def _ranges(report: StepRows, limit: int) -> Section:
    low = [row for row in report.ops if row.output in ("float16", "bfloat16")]
    low.sort(key=lambda row: (-row.non_finite, -row.subnormals - row.zeros, -row.greatest))
    cells = [
        (
            row.op,
            row.module or "-",
            "backward" if row.backward else "forward",
            row.output,
            number(row.greatest),
            number(row.least),
            percent(row.zeros),
            percent(row.subnormals),
            str(row.non_finite),
        )
        for row in low
    ]
    return Section(
        "Ranges: results in 16 bits",
        "; ".join(text for dtype, text in _ENDS.items() if any(r.output == dtype for r in low)),
        (
            "Op",
            "Module",
            "Pass",
            "Dtype",
            "Greatest>",
            "Least>",
            "Zeros>",
            "Subnormal>",
            "inf, NaN>",
        ),
        cells[:limit],
        max(len(cells) - limit, 0),
    )


def _scales(report: StepRows, limit: int) -> Section:  # noqa: ARG001
    found = report.loss_scale
    rows = []
    for scale, lost in found.underflows.items() if found else ():
        assert found is not None
        marks = ["now"] * (scale == found.scale) + ["overflows"] * (scale > found.largest_scale)
        rows.append((f"2^{round(math.log2(scale))}", percent(lost), ", ".join(marks)))
    note = "" if found is None else scale_sentence(report)
    return Section(
        "Loss scale: fp16 gradients that underflow", note, ("Scale>", "Underflow>", " "), rows
    )


def scale_sentence(report: StepRows) -> str:
    """Describes where the scale is and may be, in a sentence."""
    found = report.loss_scale
    if found is None:
        return "no fp16 gradients"
    significand, exponent = math.frexp(found.scale)
    now = f"scale 2^{exponent - 1}" if significand == 0.5 else f"scale {found.scale:g}"
    top = f"2^{round(math.log2(found.largest_scale))}"
    if found.smallest_scale is None:
        return f"{now}; gradients span more than fp16 holds: up to {top} none overflows"
    if found.smallest_scale > found.largest_scale:
        return f"{now}; no scale keeps 99.9 % of the numbers: up to {top} none overflows"
    low = f"2^{round(math.log2(found.smallest_scale))}"
    where = f"at {top} alone" if low == top else f"from {low} to {top}"
    return f"{now}; {where} none overflows and at most 0.1 % underflow"


def _gradients(report: StepRows, limit: int) -> Section:
    worst = sorted(report.gradients, key=lambda g: -(g.lost or 0.0) - g.subnormals)
    has_fp16 = uses_fp16(report)
    cells = [
        (
            row.name,
            row.dtype,
            number(row.greatest),
            number(row.least),
            percent(row.zeros),
            percent(row.lost),
            *([percent(row.subnormals)] if has_fp16 else []),
            number(row.error),
        )
        for row in worst
    ]
    return Section(
        "Gradients of parameters, as backward leaves them",
        "underflow: 0 here and not in fp32"
        + ("; subnormal: they would be in fp16" if has_fp16 else ""),
        (
            "Parameter",
            "Dtype",
            "Greatest>",
            "Least>",
            "Zeros>",
            "Underflow>",
            *(["Subnormal>"] if has_fp16 else []),
            "Error>",
        ),
        cells[:limit],
        max(len(cells) - limit, 0),
    )


def _weights(report: StepRows, limit: int) -> Section:
    worst = sorted(report.weights, key=lambda w: -w.stalled)
    cells = [(w.name, w.dtype, percent(w.stalled), number(w.update)) for w in worst]
    return Section(
        "Weights: what the step changed",
        "stalled: the update was below half a unit of the dtype, and nothing happened",
        ("Parameter", "Dtype", "Stalled>", "|update|/|weight|>"),
        cells[:limit],
        max(len(cells) - limit, 0),
    )
