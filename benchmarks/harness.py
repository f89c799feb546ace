# SPDX-License-Identifier: Apache-2.0
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

from benchmarks.budget import Effort
from benchmarks.clocks import Loop, event_loop, host_loop

BASELINE, FASTAMP = "torch.amp", "fastamp"
COPY = "copy"  # a candidate that only copies, for its bandwidth

# By candidate, by name of the fact: counts, bytes, losses; each found once, without a spread.
Facts = dict[str, dict[str, float]]
# Kernels that fastamp runs in one call, and the bytes that each reads and writes.
Passes = list[tuple[str, int]]

# A call this long needs no warm-up: what hooks leave cold costs microseconds.
LONG_CALL = 5e6
# A block counts as long enough if it is so this many times: a hiccup of the machine comes once.
CALIBRATIONS = 5
# Nanoseconds that no hiccup lasts: a block that long is long enough at once.
NO_HICCUP = 2e8
# A first sample so many times a typical one, or so small a part of it, is reported.
FAR = 2.0


def nothing() -> None:
    """The default of hooks."""


@dataclass(frozen=True)
class Candidate:
    """One way of doing a row's work.

    Attributes:
        statement: Python source, run in a loop.
        names: The names it uses.
        before: Run before every block, not timed.
        after: Run after every block, not timed.
    """

    statement: str
    names: dict[str, Any]
    before: Callable[[], None] = nothing
    after: Callable[[], None] = nothing


@dataclass(frozen=True)
class Goal:
    """Goal of a row.

    Attributes:
        text: For the reader.
        reached: Judges what was measured.
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
        group: Section of the table.
        device: ``cpu`` or ``cuda``.
        bytes_moved: Bytes that one call must read and write, for rows bound by memory.
        clock: ``host``, or ``events`` for a GPU's own clock and a cold L2 cache.
        goal: What the project wants, if anything.
        curve: Name of the scaling curve that the row is a point of, and where on its x axis.
        work: Units of work of one call, and what they are: ``(32, "images")``.
        facts: Returns what is counted and not timed; called before the candidates are made, and
            given whether it should be quick about it.
        weight: Share of the time of a run, relative to other rows: the seconds that it takes,
            roughly.
        passes: What fastamp's kernels move, for rows that are one or more of them.
        copy_bytes: Bytes that the candidate ``copy`` reads and writes, if there is one.
    """

    name: str
    candidates: Callable[[], dict[str, Candidate]]
    group: str = ""
    device: str = "cpu"
    bytes_moved: int = 0
    clock: str = "host"
    goal: Goal | None = None
    curve: tuple[str, float] | None = None
    work: tuple[float, str] | None = None
    facts: Callable[[bool], Facts] | None = None
    weight: float = 1.0
    passes: Passes = field(default_factory=list)
    copy_bytes: int = 0


@dataclass
class Result:
    """Result of one row: nanoseconds per call, one number per repeat.

    ``seconds`` is what the row took in all; the other fields are the row's own or for the reader.
    """

    name: str
    calls_per_block: int
    samples: dict[str, list[float]]
    bytes_moved: int = 0
    goal: str = ""
    goal_reached: bool | None = None
    notes: list[str] = field(default_factory=list)
    group: str = ""
    device: str = "cpu"
    clock: str = "host"
    curve: tuple[str, float] | None = None
    work: tuple[float, str] | None = None
    facts: Facts = field(default_factory=dict)
    seconds: float = 0.0
    passes: Passes = field(default_factory=list)
    copy_bytes: int = 0

    @property
    def repeats(self) -> int:
        """Returns how many samples there are of each candidate."""
        return min((len(samples) for samples in self.samples.values()), default=0)

    @property
    def compared(self) -> bool:
        """Whether torch.amp has a time here. It has no counterpart of some parts of fastamp."""
        return BASELINE in self.samples

    def median(self, candidate: str) -> float:
        """Returns nanoseconds per call."""
        return statistics.median(self.samples[candidate])

    def ratios(self, over: str = BASELINE, under: str = FASTAMP) -> list[float]:
        """Returns one candidate's time over another's, for each repeat."""
        pairs = zip(self.samples[over], self.samples[under], strict=True)
        return [a / b for a, b in pairs]

    def speedup(self, over: str = BASELINE) -> tuple[float, float, float]:
        """Returns quartile, median and quartile of a candidate's time over fastamp's."""
        low, middle, high = statistics.quantiles(self.ratios(over), n=4)
        return low, middle, high


@contextmanager
def prepared(candidate: Candidate) -> Iterator[None]:
    """Runs the candidate's hooks around a block."""
    candidate.before()
    try:
        yield
    finally:
        candidate.after()


def compile_loop(candidate: Candidate, row: Row) -> Loop:
    """Returns a function of a count, that returns the nanoseconds of so many calls."""
    if row.clock == "events":
        return event_loop(candidate.statement, candidate.names)
    return host_loop(candidate.statement, candidate.names, row.device)


class _Blocks:
    """The candidates of a row, ready to be run block by block."""

    def __init__(self, row: Row) -> None:
        self._candidates = row.candidates()
        self._loops = {
            name: compile_loop(candidate, row) for name, candidate in self._candidates.items()
        }
        self._call = dict.fromkeys(self._loops, 0.0)  # the fastest yet; 0: none

    def names(self) -> list[str]:
        return list(self._loops)

    def run(self, name: str, count: int) -> float:
        """Returns nanoseconds per call; short calls are made once before the clock starts."""
        with prepared(self._candidates[name]):
            if self._call[name] < LONG_CALL:
                self._note(name, self._loops[name](1))
            found = self._loops[name](count) / count
        self._note(name, found)
        return found

    def _note(self, name: str, call: float) -> None:
        """Keeps the fastest: a call that a hiccup made long is not one that needs no warm-up."""
        self._call[name] = min(self._call[name] or call, call)

    def calls_for(self, seconds: float) -> int:
        """Returns how many calls of the baseline take so long, however fast the machine is then."""
        count = 1
        while count < 10**7 and not self._lasts(count, seconds * 1e9):
            count *= 2
        return count

    def _lasts(self, count: int, nanoseconds: float) -> bool:
        """Returns whether the fastest of some blocks of the baseline lasts so long."""
        for _ in range(CALIBRATIONS):
            block = self.run(self.names()[0], count) * count
            if block < nanoseconds:
                return False
            if block > NO_HICCUP:
                return True
        return True


def _sample(row: Row, effort: Effort, start: float) -> tuple[int, dict[str, list[float]]]:
    blocks = _Blocks(row)
    count = blocks.calls_for(effort.block_seconds)
    for name in blocks.names():
        blocks.run(name, count)
    samples: dict[str, list[float]] = {name: [] for name in blocks.names()}
    repeats = 0
    while not effort.enough(repeats, time.perf_counter() - start):
        order = blocks.names() if repeats % 2 == 0 else blocks.names()[::-1]
        for name in order:
            samples[name].append(blocks.run(name, count))
        repeats += 1
    return count, samples


def measure(row: Row, effort: Effort) -> Result:
    """Measures a row; the garbage collector is off meanwhile."""
    start = time.perf_counter()
    facts = row.facts(effort.quick) if row.facts is not None else {}
    gc.collect()
    gc.freeze()  # only modules live between rows: later collections need not look at them
    gc.disable()
    try:
        count, samples = _sample(row, effort, start)
    finally:
        gc.enable()
    gc.collect()
    result = Result(row.name, count, samples, row.bytes_moved)
    result.group, result.device, result.clock = row.group, row.device, row.clock
    result.curve, result.work, result.facts = row.curve, row.work, facts
    result.passes, result.copy_bytes = row.passes, row.copy_bytes
    result.seconds = round(time.perf_counter() - start, 2)
    note_repeats(result, effort)
    note_first_samples(result)
    judge(result, row.goal)
    return result


def note_repeats(result: Result, effort: Effort) -> None:
    """Writes into the result if it has fewer repeats than was promised."""
    if result.repeats < effort.promised_repeats:
        result.notes.append(f"only {result.repeats} repeats, for want of time")


def note_first_samples(result: Result) -> None:
    """Writes into the result if the first sample of a candidate is far from the others."""
    for name, (first, *others) in result.samples.items():
        if len(others) < 2:
            continue
        share = first / statistics.median(others)
        # Far from them all, and not only from the middle of samples that are spread anyway.
        if (share > FAR and first > max(others)) or (share < 1 / FAR and first < min(others)):
            result.notes.append(f"{name}: the first sample is {share:.2g} times the median")


def judge(result: Result, goal: Goal | None) -> None:
    """Writes into the result whether the goal is reached."""
    if goal is not None:
        result.goal, result.goal_reached = goal.text, goal.reached(result)
