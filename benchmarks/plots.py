# SPDX-License-Identifier: Apache-2.0
"""Plots of a result: speed-ups with their spread, scaling curves with the bandwidth limit."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.harness import BASELINE, FASTAMP, Result
from benchmarks.rows.scaler import size
from benchmarks.table import duration

# Okabe and Ito's colours: distinguished without colour vision, and in print by their lightness.
COLOURS = {BASELINE: "#D55E00", FASTAMP: "#0072B2", "bound": "#555555"}
OTHERS = ("#009E73", "#CC79A7", "#E69F00")
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "svg.hashsalt": "fastamp",  # else every file differs from the last
    "svg.fonttype": "path",
}
BOUND = "foreach mul"
TICKS = [0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5]


def save(figure: Figure, path: Path) -> None:
    """Writes an SVG on white, the same bytes for the same figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None}, facecolor="white", bbox_inches="tight")


def _short(name: str) -> str:
    return name.removeprefix("cpu: ").removeprefix("cuda: ")


def speedups(results: list[Result], title: str, over: str = BASELINE) -> Figure:
    """Returns a row for each result: median and quartiles of the speed-up, on a log axis."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 0.9 + 0.24 * len(results)))
        axes: Any = figure.subplots()
        for place, result in enumerate(results):
            low, middle, high = result.speedup(over)
            colour = COLOURS[FASTAMP] if low > 1 else COLOURS[BASELINE] if high < 1 else "#777777"
            axes.plot([low, high], [place, place], color=colour, linewidth=3, alpha=0.35)
            face = "white" if result.goal_reached is False else colour
            axes.plot(middle, place, "o", color=colour, markerfacecolor=face, markersize=4.5)
            axes.annotate(
                f"{middle:.2f}x",
                (high, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(range(len(results)), [_short(result.name) for result in results])
        axes.set_ylim(len(results) - 0.4, -0.6)
        axes.set_xscale("log", base=2)
        ends = [end for result in results for end in result.speedup(over)]
        left, right = min(0.8, 0.93 * min(ends)), 1.2 * max(1.4, *ends) ** 1.08
        axes.set_xlim(left, right)
        ticks = TICKS if right < 3 else [2.0**power for power in range(-8, 12)]
        axes.set_xticks([tick for tick in ticks if left <= tick <= right])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axes.set_xlabel(
            f"speed over {over}: median and quartiles of pairs\n"
            "grey: the quartiles include 1; hollow: a goal is missed"
        )
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    return figure


def _candidate_style(name: str, others: list[str]) -> dict[str, Any]:
    if name in (BASELINE, FASTAMP):
        return {"color": COLOURS[name], "marker": "o" if name == FASTAMP else "s"}
    return {"color": OTHERS[others.index(name) % len(OTHERS)], "marker": "^", "linestyle": "--"}


def _line(axes: Any, points: list[Result], name: str, style: dict[str, Any]) -> None:
    places = [result.curve[1] for result in points if result.curve is not None]
    quartiles = [statistics.quantiles(result.samples[name], n=4) for result in points]
    low, middle, high = zip(*quartiles, strict=True)
    axes.plot(places, middle, label=name, markersize=4, linewidth=1.4, **style)
    axes.fill_between(places, low, high, color=style["color"], alpha=0.18, linewidth=0)
    last = points[-1]
    apart = name == FASTAMP or last.median(BASELINE) > 1.4 * last.median(FASTAMP)
    if name in (BASELINE, FASTAMP) and apart:
        axes.annotate(
            duration(middle[-1]),
            (places[-1], middle[-1]),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=style["color"],
        )


def _bound(axes: Any, points: list[Result]) -> None:
    """Draws the time that the bytes of a call take at the best rate that any size reached."""
    sized = [result for result in points if result.bytes_moved and BOUND in result.samples]
    if not sized:
        return
    # Of sizes beyond the caches: the last two.
    rate = max(result.bytes_moved / result.median(BOUND) for result in sized[-2:])
    places = [result.curve[1] for result in sized if result.curve is not None]
    times = [result.bytes_moved / rate for result in sized]
    axes.plot(
        places,
        times,
        color=COLOURS["bound"],
        linestyle=":",
        linewidth=1.2,
        label=f"memory bandwidth, {rate:.3g} GB/s",
    )


def curve(points: list[Result], title: str) -> Figure:
    """Returns time against tensors or bytes, both on log axes, with the limit of the memory."""
    points = sorted(points, key=lambda result: result.curve[1] if result.curve else 0)
    in_bytes = "bytes" in title
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.9))
        axes: Any = figure.subplots()
        names = [name for name in points[0].samples if name not in (BASELINE, FASTAMP)]
        for name in (BASELINE, FASTAMP, *names):
            having = [result for result in points if name in result.samples]
            _line(axes, having, name, _candidate_style(name, names))
        _bound(axes, points)
        axes.set_xscale("log", base=2 if in_bytes else 10)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        if in_bytes:
            axes.xaxis.set_major_locator(LogLocator(base=4))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(int(value))))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("gradients, fp32" if in_bytes else "tensors of 16 elements")
        axes.set_ylabel("time per call")
        axes.margins(x=0.1)
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.legend(frameon=False, fontsize=8)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    return figure
