# SPDX-License-Identifier: Apache-2.0
"""An inspection as one HTML page: drawings in SVG, tables, nothing to load."""

from __future__ import annotations

import html
import math

from fastamp._debug.inspect.drawings import error_bars, exponent_map, scale_curve
from fastamp._debug.inspect.inspect_rows import StepRows, low_share, uses_fp16
from fastamp._debug.inspect.inspect_sections import sections_of
from fastamp._debug.report import cards_of, page, section_of, table_of
from fastamp._util.tool_guard import ToolGuard

__all__ = ["page_of"]


def page_of(report: StepRows) -> str:
    """Returns the page."""
    guard = ToolGuard("a part of fastamp.debug.inspect's page", "is left out")
    parts = [guard.run_always(part, report, default="") for part in (_head, _findings, _drawings)]
    return page(
        f"fastamp inspect: {html.escape(str(report.title))}",
        [*parts, *map(table_of, sections_of(report, rows=200))],
    )


def _drawings(report: StepRows) -> str:
    has_fp16 = uses_fp16(report)
    ends = "; between the lines fp16 is normal, left of them subnormal, then 0" if has_fp16 else ""
    drawings = [
        (
            "Where the loss scale may be",
            "Share of fp16 gradient numbers that underflow or "
            "overflow, by scale; those of the fp32 twin, so that what is lost already counts",
            scale_curve(report.loss_scale),
        ),
        (
            "Largest errors",
            "Relative to fp32 on the same inputs (full bar), and to a step that "
            "runs in fp32 as a whole (outline); logarithmic",
            error_bars(report.ops),
        ),
        (
            "How large gradients of parameters are",
            f"Share of the numbers by exponent, the loss scale in them{ends}",
            exponent_map([(g.name, g.exponents) for g in report.gradients], ends_of_fp16=has_fp16),
        ),
        (
            "How large results in 16 bits are",
            "The same of the results of forward ops",
            exponent_map(
                [
                    (f"{row.op} {row.module}".strip(), row.exponents)
                    for row in report.ops
                    if row.output in ("float16", "bfloat16") and not row.backward and row.exponents
                ],
                ends_of_fp16=has_fp16,
            ),
        ),
    ]
    return "\n".join(section_of(*drawing) for drawing in drawings if drawing[-1])


def _head(report: StepRows) -> str:
    share = low_share(report.ops)
    errors = [row.local_error for row in report.ops if row.local_error is not None]
    inherited = {row.op for row in report.ops if row.reason == "inherited"}
    cards = [
        (f"{sum(row.calls for row in report.ops)}", "op calls"),
        ("-" if share is None else f"{100 * share:.0f} %", "of the work of products in 16 bits"),
        (str(len(inherited)), "ops in 16 bits by no rule of autocast, but by their inputs"),
        (f"{max(errors):.2g}" if errors else "-", "largest local error"),
    ]
    scale = report.loss_scale
    if scale is not None:
        window = f"up to 2<sup>{round(math.log2(scale.largest_scale))}</sup>"
        if scale.smallest_scale is not None and scale.smallest_scale <= scale.largest_scale:
            low_end = round(math.log2(scale.smallest_scale))
            high_end = round(math.log2(scale.largest_scale))
            window = f"2<sup>{low_end}</sup> .. 2<sup>{high_end}</sup>"
        cards.append((window, f"loss scales that fit; now {scale.scale:g}"))
    cards.append((str(len(report.check.findings)), "findings"))
    text = "fastamp inspect"
    if report.check.cause:
        text += f"; {html.escape(str(report.check.cause))}"
    elif report.skipped:
        text += "; the scaler skipped the step: gradients were inf or NaN"
    return f"<h1>{html.escape(str(report.title))}</h1><p>{text}</p>{cards_of(cards)}"


def _findings(report: StepRows) -> str:
    if not report.check:
        return ""
    rules = []
    for name in dict.fromkeys(finding.rule for finding in report.check.findings):
        found = [f for f in report.check.findings if f.rule == name]
        places = "<br>".join(html.escape(f"{f.where}: {f.what}") for f in found[:8])
        rules.append(
            f'<div class="rule"><b>{name}</b><div>{html.escape(found[0].reason)}</div>'
            f"<div>{places}</div><div><b>Fix:</b> {html.escape(found[0].fix)}</div></div>"
        )
    return f"<section><h2>Findings</h2>{''.join(rules)}</section>"
