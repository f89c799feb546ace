# SPDX-License-Identifier: Apache-2.0
"""Which mutant is on, and which have been reached: memory that all processes of a run share.

A file: the number of the mutant that is on, 0 for none, in four bytes, the lowest first; then a
byte for each number, which the switch of that mutant sets to 1 whenever it is asked.
"""

from __future__ import annotations

import mmap
from pathlib import Path


class Control:
    """The side of who chooses."""

    def __init__(self, path: Path, count: int) -> None:
        """Opens the file, or makes it.

        Args:
            path: Of the file.
            count: The largest number.
        """
        size = 4 + count + 1
        if not path.is_file() or path.stat().st_size != size:
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)

    def choose(self, number: int) -> None:
        """Turns a mutant on; 0: none."""
        self._memory[:4] = number.to_bytes(4, "little")

    def take_reached(self) -> set[int]:
        """Returns the numbers that were asked for since the last call."""
        asked = self._memory[4:]
        self._memory[4:] = bytes(len(asked))
        return {number for number, byte in enumerate(asked) if byte}
