"""Results as text: the table, and every row where fastamp is slower."""

from __future__ import annotations

import shutil

from benchmarks.harness import BASELINE, OURS, Result


def duration(nanoseconds: float) -> str:
    """Returns a duration with its unit, three digits."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


def others(result: Result) -> str:
    """Returns the times of the candidates beside the two, and how ours compares with each."""
    texts = []
    for name in result.samples:
        if name not in (BASELINE, OURS):
            low, middle, high = result.speedup(name)
            texts.append(
                f"{name} {duration(result.median(name))} ({middle:.2f}x, {low:.2f}-{high:.2f})"
            )
    return ", ".join(texts)


def remarks(result: Result) -> list[str]:
    """Returns what there is to say about a row beyond its times."""
    found = [others(result)] if len(result.samples) > 2 else []
    if result.bytes_moved:
        rates = (
            f"{name} {result.bytes_moved / result.median(name):.3g}" for name in (BASELINE, OURS)
        )
        found.append(", ".join(rates) + " GB/s")
    if result.work:
        amount, unit = result.work
        rates = (f"{name} {amount / result.median(name) * 1e9:.4g}" for name in (BASELINE, OURS))
        found.append(", ".join(rates) + f" {unit}/s")
    if result.goal:
        found.append(f"{result.goal}: {'reached' if result.goal_reached else 'MISSED'}")
    return found + result.notes


def cells(result: Result) -> dict[str, str]:
    """Returns one row of the table by column."""
    low, middle, high = result.speedup()
    return {
        "row": result.name,
        BASELINE: duration(result.median(BASELINE)),
        OURS: duration(result.median(OURS)),
        "speed-up": f"{middle:.2f}x",
        "quartiles": f"{low:.2f}-{high:.2f}",
        "repeats": str(result.repeats),
        "remarks": "; ".join(remarks(result)),
    }


def slower(results: list[Result]) -> list[str]:
    """Returns one line for each row whose median is slower than torch.amp's."""
    lines = []
    for result in results:
        low, middle, high = result.speedup()
        if middle < 1:
            noise = ", within noise" if high >= 1 else ""
            quartiles = f"quartiles {low:.2f}-{high:.2f}{noise}"
            lines.append(f"{result.name}: {middle:.2f}x ({quartiles})")
    return lines


def text_table(results: list[Result]) -> str:
    """Returns the table as wide as the terminal allows; remarks go below their row."""
    rows = [cells(result) for result in results]
    columns = ["row", BASELINE, OURS, "speed-up", "quartiles", "repeats"]
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
        lines += [f"    {remark}" for remark in remarks(result)]
        for name, facts in result.facts.items():
            values = ", ".join(f"{fact} {value:.4g}" for fact, value in facts.items())
            lines.append(f"    {name}: {values}")
    return "\n".join(lines)


def summary(results: list[Result]) -> str:
    """Returns the closing lines: slower rows by name, goals missed."""
    behind = slower(results)
    lines = [f"fastamp is slower than torch.amp in {len(behind)} of {len(results)} rows"]
    lines += [f"  {line}" for line in behind]
    goals = [result for result in results if result.goal]
    missed = [result for result in goals if not result.goal_reached]
    lines.append(f"goals reached: {len(goals) - len(missed)} of {len(goals)}")
    lines += [f"  MISSED {result.name}: {result.goal}" for result in missed]
    return "\n".join(lines)
