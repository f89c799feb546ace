# SPDX-License-Identifier: Apache-2.0
"""The search for few of many, the cheap and likely ones first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["OutOfRuns", "needed_of"]

_Item = TypeVar("_Item")


class OutOfRuns(Exception):  # noqa: N818 (no error: the search ends with what it has)
    """No further run is allowed."""


def needed_of(
    items: Sequence[_Item], holds: Callable[[list[_Item]], bool], cheap: int
) -> list[_Item]:
    """Finds items without any of which a condition does not hold.

    Delta debugging with weights: an item is taken only if those before it do not suffice, together
    with what is needed already. Takes about log2(n) + 1 calls for each item that is needed, and one
    if that is the first one.

    Args:
        items: In the order in which they are tried. The condition holds of all of them, and of a
            set that holds one for which it does; it does not hold of none.
        holds: Returns whether the condition holds; should remember its answers.
        cheap: How many of the first items to try before any of the others.

    Returns:
        The items, the one that was found first in front.

    Raises:
        OutOfRuns: ``holds`` did.
    """
    needed: list[_Item] = []
    left = list(items)
    while left and not (needed and holds(needed)):
        length = _least_prefix(left, needed, holds, cheap)
        needed.append(left[length - 1])
        left = left[: length - 1]
    return needed


def _least_prefix(
    items: list[_Item], needed: list[_Item], holds: Callable[[list[_Item]], bool], cheap: int
) -> int:
    fails, length = 0, 1
    while length < len(items) and not holds(needed + items[:length]):
        fails = length
        length = min(length * 2, len(items))
        if fails < cheap < length:
            length = cheap
    while length - fails > 1:
        middle = (fails + length) // 2
        if holds(needed + items[:middle]):
            length = middle
        else:
            fails = middle
    return length
