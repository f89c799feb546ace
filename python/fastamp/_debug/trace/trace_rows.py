# SPDX-License-Identifier: Apache-2.0
"""The rows of a trace, and their sums by op."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

__all__ = ["COUNTS", "TraceRow", "sums_by_op"]


@dataclasses.dataclass(frozen=True)
class TraceRow:
    """All calls of one op that looked the same to autocast.

    Attributes:
        op: Name with overload as in :func:`fastamp.policies.table`: ``"mm"``, ``"softmax.int"``.
        device: Whose policy was applied, ``"cpu"`` or ``"cuda"``.
        policy: The policy in force for these calls.
        inputs: Dtypes of the tensor arguments as given, in order.
        run_dtype: Dtype that castable arguments had when the op ran; empty without tensors.
        float8: In an fp8 region, of ops that can run in fp8: ``"float8"`` if they did (the casts
            are to fp8, the result is in ``run_dtype``), else why not. Empty elsewhere.
        source: ``"file:line"`` of the Python call with ``source=True``, else empty. Empty too for
            calls without Python code of the user around them, as in backward passes.
        module: With ``source=True``, the innermost module whose forward pass the call is in, by its
            name in the outermost one; that one by its class. Empty outside of modules.
        calls: How often the op was called like this.
        weight_casts: Casts made of float32 parameters for these calls.
        other_casts: Casts made of inputs, activations and anything else.
        cast_bytes: Size of the casts made, in bytes.
        cache_hits: Casts of weights found in the cache of the region.
        activation_hits: Casts of activations that shared the memory of an earlier one.
        kept_hits: Casts of weights kept from an earlier region.
    """

    op: str
    device: str
    policy: str
    inputs: tuple[str, ...]
    run_dtype: str
    float8: str
    source: str
    module: str
    calls: int
    weight_casts: int
    other_casts: int
    cast_bytes: int
    cache_hits: int
    activation_hits: int
    kept_hits: int

    @property
    def casts(self) -> int:
        """Casts made, of weights and of anything else."""
        return self.weight_casts + self.other_casts


#: The attributes that are counts of casts.
COUNTS = (
    "weight_casts",
    "other_casts",
    "cast_bytes",
    "cache_hits",
    "activation_hits",
    "kept_hits",
)


def sums_by_op(rows: Iterable[TraceRow]) -> list[tuple[str, dict[str, int]]]:
    """Counts per op over all dtypes and lines, largest casts first."""
    sums: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = sums.setdefault(row.op, dict.fromkeys(COUNTS, 0))
        for name in COUNTS:
            counts[name] += getattr(row, name)
    return sorted(sums.items(), key=lambda item: (-item[1]["cast_bytes"], item[0]))
