# SPDX-License-Identifier: Apache-2.0
"""Programs as data: statements that can be left out one by one, and printed as Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

# Calls whose errors are caught: those that raise none are printed without.
_GUARDED = re.compile(r"(?:use|tried)\(lambda: (.*?)(?:, \w+)?\)(?=\)?$)")


@dataclass(frozen=True)
class Block:
    """A line that ends in a colon, what stands in it, and what comes after it.

    Attributes:
        head: The line.
        body: Statements in it.
        after: A line behind the block, at its own depth; "" for none.
    """

    head: str
    body: tuple[Statement, ...]
    after: str = ""


Statement = str | Block


@dataclass(frozen=True)
class Program:
    """A program that is run twice: as the reference (NEW is False) and with what is tested.

    Attributes:
        seed: What it was made from.
        reference: "torch": torch.amp and torch's kernels; "fastamp": fastamp without an option.
        statements: What it does.
        installed: Whether the second run uses torch's names while fastamp is installed.
    """

    seed: int
    reference: str
    statements: tuple[Statement, ...]
    installed: bool = False

    def source(self) -> str:
        """The statements as the body of a function."""
        return "\n".join(lines(self.statements, 1)) or "    pass"


def lines(statements: tuple[Statement, ...], depth: int = 0) -> Iterator[str]:
    indent = "    " * depth
    for statement in statements:
        if isinstance(statement, str):
            yield from (indent + line for line in statement.split("\n"))
            continue
        yield indent + statement.head
        yield from lines(statement.body, depth + 1)
        if not statement.body:
            yield indent + "    pass"
        if statement.after:
            yield indent + statement.after


def _smaller(statements: tuple[Statement, ...]) -> Iterator[tuple[Statement, ...]]:
    """The same statements with fewer of them: halves first, then single ones."""
    size = len(statements) // 2
    while size >= 1:
        for start in range(0, len(statements), size):
            yield statements[:start] + statements[start + size :]
        size //= 2
    for i, statement in enumerate(statements):
        if not isinstance(statement, Block):
            plain = _GUARDED.sub(r"\1", statement)
            if plain != statement:
                yield (*statements[:i], plain, *statements[i + 1 :])
            continue
        # What is asked of gradients keeps a program from documented differences.
        if statement.head.startswith(("with ", "for ")):
            yield statements[:i] + statement.body + statements[i + 1 :]
        for body in _smaller(statement.body):
            yield (*statements[:i], replace(statement, body=body), *statements[i + 1 :])


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a statement less, the ones that lack most first."""
    if program.installed:
        yield replace(program, installed=False)
    for statements in _smaller(program.statements):
        yield replace(program, statements=statements)
