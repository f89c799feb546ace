# SPDX-License-Identifier: Apache-2.0
"""Breaks of a source in one place each, and a source in which a number chooses one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One change of a source.

    Attributes:
        begin: Where it begins, in bytes.
        end: Where it ends.
        line: Its first line, from 1.
        last: Its last line.
        old: The text that is replaced.
        new: What takes its place, on one line.
        switch: Both with the choice between them: a format of ``number``, ``old`` and ``new``.
    """

    begin: int
    end: int
    line: int
    last: int
    old: str
    new: str
    switch: str


def switched(source: str, mutations: Mapping[int, Mutation]) -> str:
    """Returns a source that behaves as with one of the mutations, or none, by a number.

    Its lines are those of the source.

    Args:
        source: The text of a file.
        mutations: Changes by their numbers: of nodes of one syntax tree, so that of two one is
            within the other, or they are apart.
    """
    data = source.encode()
    changes = sorted(mutations.items(), key=lambda item: (item[1].begin, -item[1].end, item[0]))
    return _rendered(data, 0, len(data), changes)


def _rendered(data: bytes, begin: int, end: int, changes: list[tuple[int, Mutation]]) -> str:
    """A part of a source with the changes in it, the outer ones and those in front first."""
    text = ""
    while changes:
        (number, change), *others = changes
        inside = [(n, other) for n, other in others if other.end <= change.end]
        changes = others[len(inside) :]
        old = _rendered(data, change.begin, change.end, inside)
        text += data[begin : change.begin].decode()
        text += change.switch.format(number=number, old=old, new=change.new)
        begin = change.end
    return text + data[begin:end].decode()
