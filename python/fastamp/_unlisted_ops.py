# SPDX-License-Identifier: Apache-2.0
"""Ops that policies name although no line of the op table does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import fastamp._C as _C
from fastamp._policy import op_table, register_op, unregister_op
from fastamp._policy_file import DEVICES, PolicyFile

__all__ = ["is_listed", "listed"]


def is_listed(op: str) -> bool:
    """Whether the op table has lines for a name, as :func:`fastamp.op_policy` reads names."""
    name = op.removeprefix("aten::")
    base, _, overload = name.partition(".")
    rows = [row.op for row in op_table()]
    if overload in ("", "*"):
        return any(row.partition(".")[0] == base for row in rows)
    return (base if overload == "default" else name) in rows


def _entries(file: PolicyFile) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """All op policies of a file: where they stand, op, policy."""
    for op, policy in file.ops.items():
        yield ("ops", op), op, policy
    for pattern, value in file.modules.items():
        if isinstance(value, Mapping):
            for op, policy in value.items():
                yield ("modules", pattern, op), op, policy


@contextlib.contextmanager
def listed(file: PolicyFile) -> Iterator[None]:
    """Checks the ops of a file, those that are not in the op table registered as ``pass``.

    If this or the block raises, they are taken out again.

    Raises:
        ValueError: An op is unknown or cannot carry its policy; the text says where it stands.
    """
    registered: list[str] = []
    try:
        for where, op, policy in _entries(file):
            try:
                if "::" in op and not is_listed(op):
                    name = op.removesuffix(".default").removesuffix(".*")
                    register_op(name, "pass")
                    registered.append(name)
                by_device = (
                    policy if isinstance(policy, Mapping) else dict.fromkeys(DEVICES, policy)
                )
                for device, chosen in by_device.items():
                    _C.checked_op_policies([(op, chosen)], device)
            except ValueError as error:
                # Without the name of the function that a reader of the file has not called.
                raise file.refusal(where, str(error).partition(": ")[2]) from error
        yield
    except BaseException:
        for name in reversed(registered):
            unregister_op(name)
        raise
