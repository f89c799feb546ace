"""The op lists: what autocast does with each op."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import fastamp._C as _C
from fastamp import _compile

__all__ = ["OpTableRow", "op_policy", "op_table", "reset_op_policies", "set_op_policy"]


class OpTableRow(NamedTuple):
    """One op and its policies, now and by default.

    Policies: ``pass`` (run as it is), ``lower`` (cast to the region's dtype), ``fp32`` (cast to
    float32), ``set_opt_dtype`` and ``append_dtype`` (give the op a float32 output dtype),
    ``promote`` (widest dtype among the arguments), ``banned`` (refuse).
    """

    op: str
    cpu: str
    cuda: str
    cpu_default: str
    cuda_default: str


def op_table() -> list[OpTableRow]:
    """Every op autocast can act on, with its policies now and by default."""
    return [OpTableRow(*row) for row in _C.op_table()]


def op_policy(name: str, device: str) -> str:
    """The policy of an op.

    Args:
        name: ``"mm"``, ``"softmax.int"`` or ``"aten::softmax.int"``. A name without overload is
            accepted if all its overloads have the same policy.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: unknown op (the nearest names are given), another device, or a name whose
            overloads differ.
    """
    return _C.op_policy(name, device)


def set_op_policy(name: str, policy: str, device: str | None = None) -> None:
    """Changes the policy of an op for the whole process.

    Compiled graphs are dropped, so that ``torch.compile`` sees the new policy. Do it while no other
    thread runs ops under autocast.

    Args:
        name: As for :func:`op_policy`; a name without overload changes all its overloads.
        policy: One of the names in :class:`OpTableRow`.
        device: ``"cpu"``, ``"cuda"``, or both by default.

    Raises:
        ValueError: unknown op, policy or device, or a policy the op cannot carry. Nothing is
            changed then.
    """
    _C.set_op_policy(name, policy, device)
    _compile.policies_changed(_table_hash())


def reset_op_policies() -> None:
    """Undoes every edit made by :func:`set_op_policy`."""
    _C.reset_op_policies()
    _compile.policies_changed(_table_hash())


def _table_hash() -> str:
    """Names the edits in force; empty when there are none."""
    edits = [
        row for row in op_table() if (row.cpu, row.cuda) != (row.cpu_default, row.cuda_default)
    ]
    return hashlib.sha256(repr(edits).encode()).hexdigest()[:16] if edits else ""
