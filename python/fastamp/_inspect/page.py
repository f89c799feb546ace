# SPDX-License-Identifier: Apache-2.0
"""An inspection as one HTML page: drawings in SVG, tables, nothing to load."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastamp._inspect.drawings import error_bars, exponent_map, scale_curve
from fastamp._inspect.sections import Section, sections_of

if TYPE_CHECKING:
    from fastamp._inspect.report import InspectReport

__all__ = ["page_of"]

_STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1b1f24, #e6e8eb); --soft: light-dark(#6a737d,
  #9aa4af); --line: light-dark(#d9dee3, #343a41); --card: light-dark(#fff, #1d2125);
  --page: light-dark(#f5f6f8, #14171a); --a: light-dark(#2563a8, #6aa9ea);
  --b: light-dark(#b3541e, #e59b62); --bad: light-dark(#b42318, #f97066);
  --good: light-dark(#1a7f4b, #57c98d); }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 24px 60px; max-width: 1180px; background: var(--page);
  color: var(--ink); font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0 0 2px; }
p { margin: 0 0 10px; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 18px; margin: 16px 0; overflow-x: auto; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px;
  margin: 16px 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 14px; }
.card b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 12.5px; }
table { border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 600; cursor: pointer; }
th, td { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.n, th.n { text-align: right; }
.tag { border-radius: 4px; padding: 0 6px; border: 1px solid var(--line); }
.inherited, .weights { color: var(--b); border-color: var(--b); }
.lower { color: var(--a); border-color: var(--a); }
.rule { border-left: 3px solid var(--b); padding: 2px 0 2px 12px; margin: 12px 0; }
.rule b { font-size: 14px; } .rule div { color: var(--soft); }
svg { display: block; max-width: 100%; height: auto; } svg text { fill: var(--ink);
  font: 11.5px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
"""

# Sorts a table by the column whose heading was clicked; numbers by value.
_SCRIPT = """
for (const th of document.querySelectorAll('th')) th.onclick = () => {
  const body = th.closest('table').tBodies[0], i = th.cellIndex, down = th.dataset.down !== '1';
  th.dataset.down = down ? '1' : '0';
  const key = row => { const t = row.cells[i].textContent, n = parseFloat(t);
    return isNaN(n) ? t : n; };
  [...body.rows].sort((a, b) => { const x = key(a), y = key(b);
    const o = typeof x === typeof y ? (x < y ? -1 : x > y ? 1 : 0) : typeof x === 'number' ? 1 : -1;
    return down ? -o : o; }).forEach(row => body.append(row));
};
"""


def page_of(report: InspectReport) -> str:
    """Returns the page."""
    tables = sections_of(report, rows=200)
    parts = [_head(report), _findings(report)]
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
            "Share of the numbers by exponent, the loss "
            "scale in them; between the lines fp16 is normal, left of them subnormal, then 0",
            exponent_map([(g.name, g.exponents) for g in report.gradients]),
        ),
        (
            "How large results in 16 bits are",
            "The same of the results of forward ops",
            exponent_map(
                [
                    (f"{row.op} {row.module}".strip(), row.exponents)
                    for row in report.ops
                    if row.output in ("float16", "bfloat16") and not row.backward and row.exponents
                ]
            ),
        ),
    ]
    for title, note, drawing in drawings:
        if drawing:
            parts.append(f"<section><h2>{title}</h2><p>{note}</p>{drawing}</section>")
    parts += [_table(section) for section in tables]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>fastamp inspect</title><style>{_STYLE}</style></head>\n"
        f"<body>{body}<script>{_SCRIPT}</script></body></html>\n"
    )


def _head(report: InspectReport) -> str:
    flops = sum(row.flops for row in report.ops)
    low = sum(row.flops for row in report.ops if row.inputs[0] in ("float16", "bfloat16"))
    errors = [row.local_error for row in report.ops if row.local_error is not None]
    inherited = {row.op for row in report.ops if row.reason == "inherited"}
    cards = [
        (f"{sum(row.calls for row in report.ops)}", "op calls"),
        (f"{100 * low / flops:.0f} %" if flops else "-", "FLOPs of products in 16 bits"),
        (str(len(inherited)), "ops in 16 bits that no list names"),
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
    shown = "".join(
        f'<div class="card"><b>{big}</b><span>{small}</span></div>' for big, small in cards
    )
    told = "fastamp inspect"
    if report.skipped:
        told += "; the scaler skipped the step: gradients were inf or NaN"
    return f'<h1>One training step</h1><p>{told}</p><div class="cards">{shown}</div>'


def _findings(report: InspectReport) -> str:
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


def _table(section: Section) -> str:
    is_number = [column.endswith(">") for column in section.columns]
    head = "".join(
        _cell("th", column.rstrip(">"), right)
        for column, right in zip(section.columns, is_number, strict=True)
    )
    rows = "".join(f"<tr>{_row(cells, is_number)}</tr>" for cells in section.rows)
    more = f"<p>{section.omitted} more rows</p>" if section.omitted else ""
    note = f"<p>{html.escape(section.note)}</p>" if section.note else ""
    return (
        f"<section><h2>{html.escape(section.title)}</h2>{note}<table><thead><tr>{head}</tr>"
        f"</thead><tbody>{rows}</tbody></table>{more}</section>"
    )


def _row(cells: Iterable[str], is_number: list[bool]) -> str:
    return "".join(_cell("td", cell, right) for cell, right in zip(cells, is_number, strict=True))


_TAGS = {"inherited": "inherited", "16-bit weights": "weights", "lower": "lower"}


def _cell(kind: str, text: str, right: bool) -> str:
    shown = html.escape(text)
    if text in _TAGS:
        shown = f'<span class="tag {_TAGS[text]}">{shown}</span>'
    return f"<{kind}{' class=n' if right else ''}>{shown}</{kind}>"
