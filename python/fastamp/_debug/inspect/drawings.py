# SPDX-License-Identifier: Apache-2.0
"""Drawings of an inspection, as SVG elements for a page."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from fastamp._debug.inspect.inspect_rows import LossScale, OpRow

__all__ = ["error_bars", "exponent_map", "scale_curve"]

_FP16_NORMAL, _FP16_END, _FP16_ZERO = -14, 16, -25
_ROW = 17
_LABELS = 250


def _text(x: float, y: float, text: str, anchor: str = "start", soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{html.escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="var({color})"{dashes}/>'
    )


def _drawing(width: float, height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    )


def _short(name: str, length: int = 38) -> str:
    return name if len(name) <= length else f"...{name[3 - length :]}"


def scale_curve(found: LossScale | None) -> str:
    """The share of gradients that underflow by loss scale, with the scale now and the last one."""
    if found is None:
        return ""
    width, height, left, bottom = 760.0, 230.0, 50.0, 190.0
    points = sorted((math.log2(scale), share) for scale, share in found.underflows.items())
    first, last = points[0][0], max(points[-1][0], math.log2(found.largest_scale) + 2)
    top = max(max(share for _, share in points), 0.01)

    def x(exponent: float) -> float:
        return left + (exponent - first) / (last - first) * (width - left - 20)

    def y(share: float) -> float:
        return bottom - share / top * (bottom - 20)

    end = x(math.log2(found.largest_scale))
    parts = [
        f'<rect x="{end:.1f}" y="20" width="{max(width - 20 - end, 0):.1f}" '
        f'height="{bottom - 20:.1f}" fill="var(--bad)" opacity="0.13"/>',
        _text(min(end + 6, width - 90), 34, "overflows"),
    ]
    if found.smallest_scale is not None and found.smallest_scale <= found.largest_scale:
        begin = x(max(math.log2(found.smallest_scale), first))
        parts.append(
            f'<rect x="{begin:.1f}" y="20" width="{end - begin:.1f}" '
            f'height="{bottom - 20:.1f}" fill="var(--good)" opacity="0.13"/>'
        )
        parts.append(_text((begin + end) / 2, 34, "fits", "middle"))
    curve = " ".join(f"{x(e):.1f},{y(s):.1f}" for e, s in points)
    parts.append(f'<polyline points="{curve}" fill="none" stroke="var(--a)" stroke-width="2"/>')
    now = x(math.log2(found.scale)) if found.scale > 0 else left
    parts += [
        _line(now, 20, now, bottom, "--ink", "4 3"),
        _text(now, 14, f"now {found.scale:g}", "middle"),
        _line(left, bottom, width - 20, bottom, "--line"),
        _text(left - 6, y(0) + 4, "0", "end", soft=True),
        _text(left - 6, y(top) + 4, f"{100 * top:.2g} %", "end", soft=True),
    ]
    for exponent in range(math.ceil(first), math.floor(last) + 1):
        if exponent % 4 == 0:
            parts.append(_text(x(exponent), bottom + 16, f"2^{exponent}", "middle", soft=True))
    return _drawing(width, height, parts, "underflow by loss scale")


def error_bars(rows: Sequence[OpRow], limit: int = 18) -> str:
    """The ops with the largest local errors: a bar for that, an outline for the error in all."""
    found = [row for row in rows if row.local_error]
    found.sort(key=lambda row: -(row.local_error or 0.0))
    found = found[:limit]
    if not found:
        return ""
    values = [v for row in found for v in (row.local_error, row.error) if v and math.isfinite(v)]
    values = values or [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    left, width = 330.0, 980.0

    def x(value: float) -> float:
        return left + (math.log10(value) - low) / (high - low) * (width - left - 20)

    parts = []
    for decade in range(low, high + 1):
        at = x(10.0**decade)
        parts.append(_line(at, 8, at, 12 + _ROW * len(found), "--line"))
        parts.append(_text(at, 26 + _ROW * len(found), f"1e{decade}", "middle", soft=True))
    for i, row in enumerate(found):
        top = 10.0 + i * _ROW
        direction = " backward" if row.backward else ""
        label = f"{row.op} {row.module}{direction}"
        parts.append(_text(left - 8, top + 11, _short(label, 50), "end"))
        parts += _bars(row, label, top, left, x, width - 20)
    legend = 44.0 + _ROW * len(found)
    for at, color, text in (
        (left, "--a", "listed by autocast, or backward"),
        (left + 210, "--b", "no policy"),
        (left + 300, "--bad", "inf where fp32 is finite"),
    ):
        parts.append(
            f'<rect x="{at}" y="{legend - 10}" width="10" height="10" fill="var({color})"/>'
        )
        parts.append(_text(at + 15, legend, text, soft=True))
    return _drawing(width, legend + 8, parts, "errors of ops")


def _bars(
    row: OpRow, label: str, top: float, left: float, x: Callable[[float], float], end: float
) -> list[str]:
    """The bar of an op, full width if its error is infinite, and the outline around it."""
    assert row.local_error is not None
    color = "--b" if row.reason in ("inherited", "16-bit weights") else "--a"
    is_finite = math.isfinite(row.local_error)
    width = max(x(row.local_error) - left, 1) if is_finite else end - left
    parts = [
        f'<rect x="{left}" y="{top:.1f}" width="{width:.1f}" height="12" '
        f'fill="var({color if is_finite else "--bad"})">'
        f"<title>{html.escape(label)}: {row.local_error:.3g}</title></rect>"
    ]
    if row.error and math.isfinite(row.error):
        width = max(x(row.error) - left, 1)
        parts.append(
            f'<rect x="{left}" y="{top:.1f}" width="{width:.1f}" height="12" '
            f'fill="none" stroke="var(--soft)"/>'
        )
    return parts


def exponent_map(
    rows: Sequence[tuple[str, dict[int, int]]], limit: int = 40, ends_of_fp16: bool = True
) -> str:
    """A line for each name: shares of numbers by exponent as shades, from left to right.

    Args:
        rows: Names, and how many numbers there are by exponent.
        limit: Names shown at most.
        ends_of_fp16: Whether to show where fp16 is subnormal, 0 and inf.
    """
    shown = [(name, counts) for name, counts in rows if counts][:limit]
    if not shown:
        return ""
    low = min(_FP16_ZERO - 2, max(min(min(c) for _, c in shown), -60))
    high = max(_FP16_END + 2, *(max(c) for _, c in shown))
    width, top = 980.0, 22.0
    cell = (width - _LABELS - 20) / (high - low + 1)

    def x(exponent: float) -> float:
        return _LABELS + (exponent - low) * cell

    bottom = top + _ROW * len(shown)
    parts = []
    for i, (name, counts) in enumerate(shown):
        y = top + i * _ROW
        parts.append(_text(_LABELS - 8, y + 12, _short(name), "end"))
        most = max(counts.values())
        for exponent, count in counts.items():
            at = x(max(exponent, low))
            shade = 0.12 + 0.88 * math.sqrt(count / most)
            parts.append(
                f'<rect x="{at:.1f}" y="{y + 1:.1f}" width="{cell + 0.3:.1f}" '
                f'height="{_ROW - 2}" fill="var(--a)" opacity="{shade:.2f}">'
                f"<title>{html.escape(name)}: {count} of 2^{exponent}</title></rect>"
            )
    for exponent, text, anchor in (
        (_FP16_ZERO, "0 in fp16", "end"),
        (_FP16_NORMAL, "subnormal", "end"),
        (_FP16_END, "inf", "start"),
    ) * ends_of_fp16:
        parts.append(_line(x(exponent), top - 4, x(exponent), bottom, "--bad", "3 3"))
        shift = 4 if anchor == "start" else -4
        parts.append(_text(x(exponent) + shift, top - 8, text, anchor, soft=True))
    for exponent in range(low, high + 1):
        if exponent % 8 == 0:
            parts.append(_text(x(exponent), bottom + 14, f"2^{exponent}", "middle", soft=True))
    return _drawing(width, bottom + 22, parts, "numbers by exponent")
