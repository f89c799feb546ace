# SPDX-License-Identifier: Apache-2.0
"""Results as text: the table, and every row where fastamp is slower."""

from __future__ import annotations

import shutil

from benchmarks.harness import BASELINE, COPY, FASTAMP, Result
from benchmarks.traffic import rate, shown


def duration(nanoseconds: float) -> str:
    """Returns a duration with its unit, three digits."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


def others(result: Result) -> str:
    """Returns the times of further candidates, and how fastamp compares with each."""
    texts = []
    for name in result.samples:
        if name not in (BASELINE, FASTAMP, COPY):
            low, middle, high = result.speedup(name)
            texts.append(
                f"{name} {duration(result.median(name))} ({middle:.2f}x, {low:.2f}-{high:.2f})"
            )
    return ", ".join(texts)


def remarks(result: Result) -> list[str]:
    """Returns what there is to say about a row beyond its times."""
    found = [text] if (text := others(result)) else []
    if result.bytes_moved:
        rates = (
            f"{name} {rate(result.bytes_moved / result.median(name))}"
            for name in (BASELINE, FASTAMP)
        )
        found.append(", ".join(rates) + " GB/s")
    if result.work:
        amount, unit = result.work
        rates = (f"{name} {amount / result.median(name) * 1e9:.4g}" for name in (BASELINE, FASTAMP))
        found.append(", ".join(rates) + f" {unit}/s")
    if result.goal:
        found.append(f"{result.goal}: {'reached' if result.goal_reached else 'MISSED'}")
    return found + result.notes


def cells(result: Result) -> dict[str, str]:
    """Returns one row of the table by column."""
    torchs, speed, quartiles = "", "", ""
    if result.compared:
        low, middle, high = result.speedup()
        torchs = duration(result.median(BASELINE))
        speed, quartiles = f"{middle:.2f}x", f"{low:.2f}-{high:.2f}"
    return {
        "row": result.name,
        BASELINE: torchs,
        FASTAMP: duration(result.median(FASTAMP)),
        "speed-up": speed,
        "quartiles": quartiles,
        "repeats": str(result.repeats),
        "remarks": "; ".join(remarks(result)),
    }


def is_slower(result: Result, beyond_noise: bool = False) -> bool:
    """Says whether the median, or even the better quartile, is slower than torch.amp's."""
    if not result.compared:
        return False
    _, middle, high = result.speedup()
    return (high if beyond_noise else middle) < 1


def slower(results: list[Result]) -> list[str]:
    """Returns a line for each row whose median is slower than torch.amp's, the clear ones first."""
    behind = [result for result in results if is_slower(result)]
    lines = []
    for result in sorted(behind, key=lambda r: not is_slower(r, beyond_noise=True)):
        low, middle, high = result.speedup()
        noise = "" if is_slower(result, beyond_noise=True) else ", within noise"
        lines.append(f"{result.name}: {middle:.2f}x (quartiles {low:.2f}-{high:.2f}{noise})")
    return lines


def missed(results: list[Result]) -> list[str]:
    """Returns a line for each row that misses its goal, with what was measured."""
    lines = []
    for result in results:
        if result.goal and not result.goal_reached:
            found = [duration(result.median(FASTAMP))]
            found += [f"{result.speedup()[1]:.2f}x"] if result.compared else []
            own, torchs = (result.facts.get(name, {}) for name in (FASTAMP, BASELINE))
            found += [
                f"{fact} {value:.4g}, torch.amp {torchs[fact]:.4g}"
                for fact, value in own.items()
                if fact in torchs and fact in result.goal
            ]
            lines.append(f"{result.name}: {result.goal} (found: {', '.join(found)})")
    return lines


def text_table(results: list[Result]) -> str:
    """Returns the table as wide as the terminal allows; remarks go below their row."""
    rows = [cells(result) for result in results]
    columns = ["row", BASELINE, FASTAMP, "speed-up", "quartiles", "repeats"]
    sizes = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    width = shutil.get_terminal_size((100, 24)).columns
    numbers = columns[1:]
    narrow = sum(sizes.values()) + 2 * len(numbers) > width
    lead = 2 if narrow else sizes["row"]

    def line(row: dict[str, str]) -> list[str]:
        tail = "".join(f"  {row[name].rjust(sizes[name])}" for name in numbers)
        if narrow:
            return [row["row"], " " * lead + tail.lstrip(" ").rjust(len(tail))]
        return [row["row"].ljust(lead) + tail]

    lines = line({name: name for name in columns})
    for row, result in zip(rows, results, strict=True):
        lines += line(row)
        lines += [f"    {remark}" for remark in [*remarks(result), shown(result)] if remark]
        for name, facts in result.facts.items():
            values = ", ".join(f"{fact} {value:.4g}" for fact, value in facts.items())
            lines.append(f"    {name}: {values}")
    return "\n".join(lines)


def summary(results: list[Result]) -> str:
    """Returns the closing lines: slower rows by name, goals missed."""
    behind, goals = slower(results), [result for result in results if result.goal]
    lines = [f"fastamp is slower than torch.amp in {len(behind)} of {len(results)} rows"]
    lines += [f"  {line}" for line in behind]
    short = missed(results)
    lines.append(f"goals reached: {len(goals) - len(short)} of {len(goals)}")
    return "\n".join(lines + [f"  MISSED {line}" for line in short])
