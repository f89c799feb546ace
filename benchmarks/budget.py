# SPDX-License-Identifier: Apache-2.0
"""How long to measure: the effort for a row, and a run's time shared among its rows by weight."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Effort:
    """Chooses how long to measure a row.

    Attributes:
        repeats: Most blocks per candidate.
        block_seconds: Shortest block; a block is at least one call. Short ones mostly escape the
            interruptions by other programs.
        row_seconds: About how long the row may take, making its tensors and counting included.
        promised_repeats: Blocks per candidate even if that takes longer, ...
        limit_seconds: ... but no longer than this.
        least_repeats: Blocks per candidate, however long they take.
        quick: Whether counting may be cut short too.
    """

    repeats: int = 301
    block_seconds: float = 1e-3
    row_seconds: float = 10.0
    promised_repeats: int = 31
    limit_seconds: float = 20.0
    least_repeats: int = 5
    quick: bool = False

    def enough(self, repeats: int, seconds: float) -> bool:
        """Says whether a row is done after so many repeats and seconds.

        It looks at clock and count only, never at what was measured: results stay unbiased.
        """
        if repeats >= self.repeats:
            return True
        if repeats < self.least_repeats:
            return False
        promised = repeats >= self.promised_repeats
        return seconds >= (self.row_seconds if promised else self.limit_seconds)

    def repeats_for(self, each: float, spent: float) -> int:
        """Returns how many repeats of so many seconds each there is time for after those spent."""
        wanted = (self.row_seconds - spent) / each
        if wanted < self.promised_repeats:
            wanted = min(self.promised_repeats, (self.limit_seconds - spent) / each)
        return int(max(self.least_repeats, min(self.repeats, wanted)))


QUICK = Effort(repeats=31, block_seconds=3e-4, promised_repeats=5, least_repeats=3, quick=True)
# More gains nothing, however few rows a run has.
LONGEST_ROW = 30.0


class Budget:
    """Shares a run's time; what a row leaves over goes to the rows after it.

    Take light rows first: they need less than their share, and heavy ones get the rest of it.
    """

    def __init__(
        self,
        seconds: float,
        limit_seconds: float,
        weight: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the clock.

        Args:
            seconds: About how long the run should take.
            limit_seconds: How long it may take at most, so that heavy rows get what is promised.
            weight: Of all rows together.
            clock: Returns seconds; for tests.
        """
        self._clock = clock
        self._end, self._limit = clock() + seconds, clock() + limit_seconds
        self._weight = weight

    def effort(self, base: Effort, weight: float) -> Effort:
        """Returns the effort for a row of this weight; call it when the row's turn comes."""
        now = self._clock()
        share = weight / max(self._weight, weight)
        self._weight -= weight
        seconds, limit = (share * max(0.0, end - now) for end in (self._end, self._limit))
        return replace(
            base,
            row_seconds=min(LONGEST_ROW, seconds),
            limit_seconds=min(2 * LONGEST_ROW, limit),
        )

    def is_over(self) -> bool:
        """Says whether no further row may begin."""
        return self._clock() >= self._limit
