"""Measures candidates against each other: short blocks, interleaved, many repeats.

Speed of a shared machine drifts by tens of percent within seconds. Each repeat therefore runs every
candidate once, in an order that turns round every time, and ratios are taken within a repeat.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

BASELINE, OURS = "torch.amp", "fastamp"


def nothing() -> None:
    """The default of hooks."""


@dataclass(frozen=True)
class Candidate:
    """One way of doing a row's work.

    Attributes:
        statement: Python source, run in a loop.
        names: The names it uses; they become local variables, the cheapest to read.
        before: Run before every block, not timed.
        after: Run after every block, not timed.
    """

    statement: str
    names: dict[str, Any]
    before: Callable[[], None] = nothing
    after: Callable[[], None] = nothing


@dataclass(frozen=True)
class Goal:
    """What the project wants of a row.

    Attributes:
        text: For the reader.
        reached: Tells from what was measured.
    """

    text: str
    reached: Callable[[Result], bool]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: Unique; what ``--filter`` matches.
        candidates: Makes the candidates; called when the row's turn comes, so that only one row's
            tensors are alive.
        bytes_moved: Bytes that one call reads and writes, for rows bound by memory.
        wait: Waits for the device; part of the timed block.
        goal: What the project wants, if anything.
    """

    name: str
    candidates: Callable[[], dict[str, Candidate]]
    bytes_moved: int = 0
    wait: Callable[[], None] = nothing
    goal: Goal | None = None


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        repeats: Blocks per candidate, for rows that can have them in ``row_seconds``.
        block_seconds: Shortest block; a block is at least one call. Short ones mostly escape the
            interruptions by other programs.
        row_seconds: About the longest that a row may take.
        least_repeats: Blocks per candidate, even if that takes longer.
    """

    repeats: int = 301
    block_seconds: float = 1e-3
    row_seconds: float = 10.0
    least_repeats: int = 41


@dataclass
class Result:
    """What was measured of one row: nanoseconds per call, one number per repeat."""

    name: str
    calls_per_block: int
    samples: dict[str, list[float]]
    bytes_moved: int = 0
    goal: str = ""
    goal_reached: bool | None = None
    notes: list[str] = field(default_factory=list)

    def median(self, candidate: str) -> float:
        """Returns nanoseconds per call."""
        return statistics.median(self.samples[candidate])

    def speedup(self) -> tuple[float, float, float]:
        """Returns quartile, median and quartile of baseline / ours, taken within repeats."""
        pairs = zip(self.samples[BASELINE], self.samples[OURS], strict=True)
        low, middle, high = statistics.quantiles((a / b for a, b in pairs), n=4)
        return low, middle, high


def compile_loop(candidate: Candidate) -> Callable[[int, Callable[[], None]], int]:
    """Returns a function of a count and a wait, that returns the nanoseconds of the loop."""
    names = ", ".join(f"{name}={name}" for name in candidate.names)
    source = (
        f"def loop(count, wait, *, _clock=_clock, _repeat=_repeat, {names}):\n"
        "    wait()\n"
        "    start = _clock()\n"
        "    for _ in _repeat(None, count):\n"
        f"        {candidate.statement}\n"
        "    wait()\n"
        "    return _clock() - start\n"
    )
    from itertools import repeat

    namespace = {**candidate.names, "_clock": time.perf_counter_ns, "_repeat": repeat}
    exec(compile(source, f"<{candidate.statement}>", "exec"), namespace)
    loop: Callable[[int, Callable[[], None]], int] = namespace["loop"]
    return loop


@contextmanager
def prepared(candidate: Candidate) -> Iterator[None]:
    """Runs the candidate's hooks around a block."""
    candidate.before()
    try:
        yield
    finally:
        candidate.after()


def measure(row: Row, effort: Effort) -> Result:
    """Measures a row; the garbage collector is off meanwhile."""
    candidates = row.candidates()
    loops = {name: compile_loop(candidate) for name, candidate in candidates.items()}

    def block(name: str, count: int) -> float:
        with prepared(candidates[name]):
            loops[name](1, row.wait)  # what the hooks left cold
            return loops[name](count, row.wait) / count

    gc.collect()
    gc.disable()
    try:
        count = 1
        while count < 10**7 and block(BASELINE, count) * count < effort.block_seconds * 1e9:
            count *= 2
        start = time.perf_counter()
        for name in loops:
            block(name, count)
        affordable = int(effort.row_seconds / (time.perf_counter() - start))
        repeats = min(effort.repeats, max(effort.least_repeats, affordable))
        samples: dict[str, list[float]] = {name: [] for name in loops}
        for repeat in range(repeats):
            order = list(loops) if repeat % 2 == 0 else list(reversed(loops))
            for name in order:
                samples[name].append(block(name, count))
    finally:
        gc.enable()
    result = Result(row.name, count, samples, row.bytes_moved)
    judge(result, row.goal)
    return result


def judge(result: Result, goal: Goal | None) -> None:
    """Writes into the result whether the goal is reached."""
    if goal is not None:
        result.goal, result.goal_reached = goal.text, goal.reached(result)


def at_most(nanoseconds: float) -> Goal:
    """The goal that ours takes at most this long."""
    text = f"at most {nanoseconds / 1e3:g} us"
    return Goal(text, lambda result: result.median(OURS) <= nanoseconds)


def at_least_times(factor: float) -> Goal:
    """The goal that ours is this many times as fast as torch.amp."""
    return Goal(f"at least {factor:g}x", lambda result: result.speedup()[1] >= factor)


def not_slower() -> Goal:
    """The goal that ours takes no longer than torch.amp, as far as the quartiles can tell."""
    return Goal("not slower", lambda result: result.speedup()[2] >= 1)
