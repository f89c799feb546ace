# SPDX-License-Identifier: Apache-2.0
"""What the project wants of a row, as text and as a test of what was measured."""

from __future__ import annotations

from benchmarks.harness import BASELINE, FASTAMP, Goal, Result


def at_most(nanoseconds: float) -> Goal:
    """The goal that fastamp takes at most this long."""
    short = nanoseconds < 1000
    text = f"at most {nanoseconds:g} ns" if short else f"at most {nanoseconds / 1e3:g} us"
    return Goal(text, lambda result: result.median(FASTAMP) <= nanoseconds)


def at_least_times(factor: float) -> Goal:
    """The goal that fastamp is this many times as fast as torch.amp."""
    return Goal(f"at least {factor:g}x", lambda result: result.speedup()[1] >= factor)


def not_slower() -> Goal:
    """The goal that fastamp takes no longer than torch.amp, as far as the quartiles show."""
    return Goal("not slower", lambda result: result.speedup()[2] >= 1)


def near_bandwidth_of(bound: str, share: float, bytes_of_bound: int) -> Goal:
    """The goal that fastamp moves its bytes at this share of the bound's rate."""

    def reached(result: Result) -> bool:
        rate = result.bytes_moved / result.median(FASTAMP)
        return rate >= share * bytes_of_bound / result.median(bound)

    return Goal(f"{share:.0%} of {bound}'s bandwidth", reached)


def fewer(fact: str, share: float = 0.0) -> Goal:
    """The goal that a count of fastamp's is below torch.amp's by this share at least."""

    def reached(result: Result) -> bool:
        return result.facts[FASTAMP][fact] <= (1 - share) * result.facts[BASELINE][fact]

    text = f"at least {share:.0%} less {fact}" if share else f"{fact}: not more than torch.amp's"
    return Goal(text, reached)


def none_of(fact: str) -> Goal:
    """The goal that a count of fastamp's is 0."""
    return Goal(f"{fact}: 0", lambda result: result.facts[FASTAMP][fact] == 0)


def both(first: Goal, second: Goal) -> Goal:
    """The goal that two goals are reached."""
    return Goal(
        f"{first.text} and {second.text}",
        lambda result: first.reached(result) and second.reached(result),
    )
