# SPDX-License-Identifier: Apache-2.0
"""Tables and sizes as text, for terminals."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["aligned", "size_text"]


def aligned(table: Sequence[Sequence[str]], text_columns: Collection[int]) -> list[str]:
    """The lines of a table, a rule of dashes after the first.

    Args:
        table: Cells by row; the first row is the heading.
        text_columns: Numbers of the columns that are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    heading, *lines = [
        "  ".join(
            cell.ljust(width) if index in text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in table
    ]
    return [heading, "  ".join("-" * width for width in widths), *lines]


def size_text(size: int) -> str:
    """A number of bytes, in the unit that fits."""
    if size < 2**10:
        return "1 byte" if size == 1 else f"{size} bytes"
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**20:.2f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"
