# SPDX-License-Identifier: Apache-2.0
"""Arguments for every op of the table, found by trying."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import fastamp

SHAPES = [(4, 4), (2, 4, 4), (1, 2, 4, 4), (1, 2, 4, 4, 4), (4,)]
LENGTHS = [1, 2, 3]

# Where tensors of one shape will not do.
BY_HAND: dict[str, list[Any]] = {
    "addbmm": [(4, 4), (2, 4, 4), (2, 4, 4)],
    "conv_tbc": [(2, 4, 4), (2, 4, 4), (4,)],
    "prelu": [(4, 4), (1,)],
    "scaled_dot_product_attention": [(1, 2, 4, 4), (1, 2, 4, 4), (1, 2, 4, 4)],
    "triangular_solve": [(4, 4), (4, 4)],
}


class Call(NamedTuple):
    op: str
    policy: str
    function: Any
    args: tuple[Any, ...]


def _number(name: str) -> int:
    if "padding" in name or name in ("dim", "reduction"):
        return 0
    return 1


def _value(argument: Any, shape: tuple[int, ...], length: int, whole: bool) -> Any:
    """Something of the argument's type; KeyError if nothing is known for it."""
    kind = str(argument.type)
    if kind == "Tensor":
        if argument.name in ("target", "indices", "index") and whole:
            return torch.zeros(shape[:1], dtype=torch.long)
        return torch.randn(shape)
    if kind == "List[Tensor]":
        return [torch.randn(shape), torch.randn(shape)]
    if kind == "List[int]":
        return [_number(argument.name)] * length
    return {"int": _number(argument.name), "float": 0.5, "bool": False, "number": 1}[kind]


def _candidates(name: str, schema: Any) -> Iterator[tuple[Any, ...]]:
    required = [a for a in schema.arguments if not a.has_default_value() and not a.kwarg_only]
    shapes = BY_HAND.get(name)
    for shape, length, whole in itertools.product(SHAPES, LENGTHS, (False, True)):
        own = iter(shapes or ())
        try:
            yield tuple(_value(a, next(own, shape), length, whole) for a in required)
        except KeyError:
            return


def _find(name: str, function: Any) -> tuple[Any, ...] | None:
    for args in _candidates(name, function._schema):
        try:
            function(*args)
        except (RuntimeError, IndexError, NotImplementedError):
            continue
        return args
    return None


def calls_of_the_table(device: str = "cpu") -> list[Call]:
    """A call of every op that autocast does something for, as far as arguments are found."""
    torch.manual_seed(0)
    calls = []
    for row in fastamp.policies.table():
        policy = getattr(row, device)
        if policy in ("pass", "banned"):
            continue
        name, _, overload = row.op.partition(".")
        function = getattr(getattr(torch.ops.aten, name), overload or "default")
        args = _find(name, function)
        if args is not None:
            calls.append(Call(row.op, policy, function, args))
    return calls
