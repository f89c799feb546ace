# SPDX-License-Identifier: Apache-2.0
"""The op lists: what autocast does with each op."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import fastamp._C as _C
from fastamp._dynamo import compiler, stand_ins  # noqa: F401 (sets what unify asks)

__all__ = [
    "LOWERING",
    "OpTableRow",
    "op_policy",
    "op_table",
    "register_op",
    "reset_op_policies",
    "set_op_policy",
    "unregister_op",
]


#: Policies under which products of dense tensors run in the region's dtype.
LOWERING = ("lower", "lower_dense")


class OpTableRow(NamedTuple):
    """One op and its policies, now and by default.

    Policies: ``pass`` (run as it is), ``lower`` (cast to the region's dtype), ``lower_dense`` (the
    same, but to float32 if an argument is sparse), ``fp32`` (cast to float32),
    ``set_opt_dtype`` and ``append_dtype`` (give the op a float32 output dtype), ``promote`` (widest
    dtype among the arguments; of a registered op that writes an argument: that one's dtype),
    ``banned`` (refuse), ``unify`` (run as it is, and if the op refuses a mix of dtypes, in one; of
    an op added by :func:`register_op`, and of ``*``, every op without a policy).
    """

    op: str
    cpu: str
    cuda: str
    cpu_default: str
    cuda_default: str


def op_table() -> list[OpTableRow]:
    """Every op autocast can act on, with its policies in the process now and by default.

    Ops added by :func:`register_op` come last.
    """
    return [OpTableRow(*row) for row in _C.op_table()]


def op_policy(name: str, device: str) -> str:
    """The policy of an op in force on this thread, :class:`override` included.

    Args:
        name: ``"conv1d"``, ``"aten::conv1d"`` or ``"conv1d.default"``: the default overload, where
            the op has one, else all its overloads (softmax, pow). ``"conv1d.padding"``: this
            overload. ``"conv1d.*"``: all overloads in the table.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: unknown op (the nearest names are given), another device, or a name that stands
            for overloads with different policies.
    """
    return _C.op_policy(name, device)


def set_op_policy(name: str, policy: str, device: str | None = None) -> None:
    """Changes the policy of an op for the whole process.

    Compiled graphs are dropped, so that ``torch.compile`` sees the new policy. Do it while no other
    thread runs ops under autocast.

    Args:
        name: As for :func:`get`; one that stands for several overloads changes them all.
        policy: One of the names in :class:`OpTableRow`.
        device: ``"cpu"``, ``"cuda"``, or both by default.

    Raises:
        ValueError: unknown op, policy or device, or a policy the op cannot carry. Nothing is
            changed then.
    """
    _C.set_op_policy(name, policy, device)
    table_changed()


def reset_op_policies() -> None:
    """Undoes every edit made by :func:`set`."""
    _C.reset_op_policies()
    table_changed()


def register_op(name: str, policy: str, device: str | None = None) -> None:
    """Adds an op of an extension library, or one of torch's that is not in the table, to the lists.

    From then on it has a policy like any other op: :func:`table` shows it, :func:`set`
    and :class:`override` change it, :func:`reset` brings back the one given here.
    Its kernel hides an autocast kernel that another library registered for the op. A second call
    with the same name replaces its policy. At most 256 names in a process. Do it while no other
    thread runs ops under autocast; compiled graphs are dropped.

    Args:
        name: ``"mylib::op"`` or ``"mylib::op.overload"``; a name without overload adds all of them
            that can carry the policy, those that write an argument only if there are no others.
        policy: One of the names in :class:`OpTableRow` but ``append_dtype``. An op that writes one
            of its arguments, such as ``"aten::index_put_"``, cannot be given a cast of that one:
            ``promote`` casts the others to its dtype, and no other policy casts any. Tensors in
            lists, tuples and dicts are cast; an op that takes some where they would not be, such
            as in an argument of any type, or in dicts and tuples only, cannot carry a policy that
            casts.
        device: ``"cpu"``, ``"cuda"``, or both by default.

    Raises:
        ValueError: torch knows no such op (the nearest names are given), the op is in the table, or
            it cannot carry the policy. Nothing is changed then.
    """
    _C.register_op(name, policy, device)
    table_changed()


def unregister_op(name: str) -> None:
    """Removes an op that :func:`register_op` added from the lists.

    A name without overload removes all that were added under it.

    Raises:
        ValueError: :func:`register_op` did not add it.
    """
    _C.unregister_op(name)
    table_changed()


def change_op_policies(edits: Sequence[tuple[str, str]], device: str) -> None:
    """Makes several edits of the process's policies, and drops compiled graphs once.

    Args:
        edits: Pairs of op and policy, which are known to be valid.
        device: ``"cpu"`` or ``"cuda"``.
    """
    for name, policy in edits:
        _C.set_op_policy(name, policy, device)
    if edits:
        table_changed()


def table_changed() -> None:
    """Has compiled code follow the table as it is now."""
    compiler.policies_changed(table_hash())


#: The ops of the table as built.
BUILT_IN_OPS = tuple(row.op for row in op_table())
_NUM_TABLE_OPS = len(BUILT_IN_OPS)


def table_hash() -> str:
    """Names what differs from the table as built; empty when nothing does."""
    edits = [
        row
        for i, row in enumerate(op_table())
        if i >= _NUM_TABLE_OPS or (row.cpu, row.cuda) != (row.cpu_default, row.cuda_default)
    ]
    return hashlib.sha256(repr(edits).encode()).hexdigest()[:16] if edits else ""
