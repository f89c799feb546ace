# SPDX-License-Identifier: Apache-2.0
"""Knows which threads are in a backward pass."""

from __future__ import annotations

import dataclasses
import threading

__all__ = ["BackwardPasses"]


@dataclasses.dataclass
class _Pass:
    """One: whether no other thread's ran meanwhile."""

    is_alone: bool = True


class BackwardPasses:
    """Says of each thread's pass whether another thread's ran meanwhile.

    For listeners that compare gradients before and after a pass, those of all threads: looked at
    between ``begin`` and ``end``, whatever another pass has changed makes this one not alone.
    """

    def __init__(self) -> None:
        """No thread is in one."""
        self._running: dict[int, _Pass] = {}

    def begin(self) -> None:
        """Counts a pass. Call it before gradients are looked at first."""
        this = self._running[threading.get_ident()] = _Pass()
        for other in list(self._running.values()):
            if other is not this:
                other.is_alone = this.is_alone = False

    def end(self) -> bool:
        """Ends a pass. Call it after gradients were looked at last.

        Returns:
            Whether the pass was alone. (Of one that began before anyone listened nothing is known.)
        """
        return self._running.pop(threading.get_ident(), _Pass()).is_alone
