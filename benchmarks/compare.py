# SPDX-License-Identifier: Apache-2.0
"""Compares two results: ``python -m benchmarks compare OLD.json NEW.json``.

Compares the speed-up over torch.amp, taken within each run, so that it does not matter if the
machine was busier in one of them; ``--absolute`` compares fastamp's own times instead, for runs on
one quiet machine. A row has changed beyond noise if the confidence interval of new / old median
(circular block bootstrap, 99 % for all rows together by Bonferroni's correction) leaves out 1, and
the medians differ by more than the threshold, which stands for what repeats within one run cannot
show: memory layout, another order of rows. Counts (casts, syncs, bytes) have no noise: any rise of
more than 1 % is reported.

Exit status: 0 nothing became slower, 1 something did, 2 nothing can be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results_file
from benchmarks.counts import LESS_IS_BETTER
from benchmarks.harness import BASELINE, FASTAMP, Result
from benchmarks.noise import Interval, change

CONFIDENCE = 0.99
THRESHOLD = 0.05
# Parts of a result's environment that must not differ if numbers are to be compared.
SAME = ("cpu", "gpu", "torch", "threads", "onednn_max_cpu_isa", "effort")


@dataclass(frozen=True)
class Verdict:
    """One row of the comparison; ``speed`` is above 1 where the new run is faster."""

    name: str
    speed: Interval
    word: str
    more: list[str]


def _more(old: Result, new: Result) -> list[str]:
    before, after = old.facts.get(FASTAMP, {}), new.facts.get(FASTAMP, {})
    return [
        f"{fact} {before[fact]:g} -> {after[fact]:g}"
        for fact in LESS_IS_BETTER
        if fact in before and fact in after and after[fact] > 1.01 * before[fact]
    ]


def judge(old: Result, new: Result, confidence: float, threshold: float, absolute: bool) -> Verdict:
    """Compares one row of two runs."""
    if absolute or BASELINE not in old.samples or BASELINE not in new.samples:
        speed = change(new.samples[FASTAMP], old.samples[FASTAMP], confidence)
    else:
        speed = change(old.ratios(), new.ratios(), confidence)
    word = ""
    if speed.high < 1 and speed.middle < 1 / (1 + threshold):
        word = "SLOWER"
    elif speed.low > 1 and speed.middle > 1 + threshold:
        word = "faster"
    return Verdict(new.name, speed, word, _more(old, new))


def compare(
    old: list[Result], new: list[Result], *, threshold: float = THRESHOLD, absolute: bool = False
) -> list[Verdict]:
    """Compares the rows that both runs have."""
    before = {result.name: result for result in old}
    pairs = [(before[r.name], r) for r in new if r.name in before and FASTAMP in r.samples]
    confidence = 1 - (1 - CONFIDENCE) / max(len(pairs), 1)
    return [judge(a, b, confidence, threshold, absolute) for a, b in pairs]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD.json")
    parser.add_argument("new", type=Path, metavar="NEW.json")
    parser.add_argument(
        "--threshold", type=float, default=THRESHOLD, help="smallest change (%(default)s)"
    )
    parser.add_argument("--absolute", action="store_true", help="times instead of speed-ups")
    parser.add_argument("--all", action="store_true", help="print unchanged rows too")
    options = parser.parse_args(arguments)
    for path in (options.old, options.new):
        if not path.is_file():
            parser.error(f"no such file: {path}")
    if options.threshold < 0:
        parser.error(f"argument --threshold: expected at least 0, got {options.threshold}")
    return options


def print_verdicts(verdicts: list[Verdict], everything: bool) -> int:
    """Prints the rows that changed, and returns how many became worse."""
    for verdict in verdicts:
        speed = verdict.speed
        numbers = f"{speed.middle:.3f}x ({speed.low:.3f}-{speed.high:.3f})"
        if verdict.word or everything:
            print(f"{verdict.word or 'same':7} {numbers:24} {verdict.name}")
        for line in verdict.more:
            print(f"MORE    {line:24} {verdict.name}")
    worse = sum(verdict.word == "SLOWER" or bool(verdict.more) for verdict in verdicts)
    faster = sum(verdict.word == "faster" for verdict in verdicts)
    print(f"{len(verdicts)} rows compared: {worse} worse, {faster} faster beyond noise")
    return worse


def main(arguments: Sequence[str]) -> int:
    """Prints the comparison and returns the exit status."""
    options = parse(arguments)
    (old_environment, old, _), (new_environment, new, _) = (
        results_file.load(path) for path in (options.old, options.new)
    )
    for name in SAME:
        was, now = old_environment.get(name, "unknown"), new_environment.get(name, "unknown")
        if was != now:
            print(f"not the same {name}: {was} and {now}")
    verdicts = compare(old, new, threshold=options.threshold, absolute=options.absolute)
    if not verdicts:
        print("no row is in both results", file=sys.stderr)
        return 2
    return int(print_verdicts(verdicts, options.all) > 0)
