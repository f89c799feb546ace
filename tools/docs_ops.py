# SPDX-License-Identifier: Apache-2.0
"""The page of all ops that autocast acts on: op, device, policy, torch versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

DEVICES = ("cpu", "cuda")
INTRO = """# Ops

What autocast does with each op by default, from the table that the kernels are made from. Every
other op runs in the dtypes that it is given. `python -m fastamp ops NAME` says what holds in a
program, edits included.

| Policy | What happens to floating-point arguments |
|---|---|
| `lower` | cast to the region's dtype |
| `lower_dense` | the same, but cast to float32 if one of them is sparse; none by default |
| `fp32` | cast to float32 |
| `set_opt_dtype` | the op runs with `dtype=float32`, unless the caller names one |
| `append_dtype` | the op runs with `dtype=float32` added |
| `promote` | cast to the widest dtype among them |
| `banned` | the op is refused, and the error says what to use instead |
| `pass` | as they are; an edit can change it |

The last columns name the versions of torch whose own autocast registers a kernel for the op:
fastamp does so only where the torch that is running does. A dot stands for an op that torch does
not autocast, and that fastamp acts on only after an edit ([policies](policies.md)).
"""


def versions_of(op: str, device: str, lists: Mapping[str, Mapping[str, Iterable[str]]]) -> str:
    """Returns the torch versions that autocast an op on a device, as text.

    Args:
        op: As ``fastamp.policies.table()`` spells it, such as ``conv1d`` or ``softmax.int``.
        device: ``cpu`` or ``cuda``.
        lists: By version and device, the ops with an autocast kernel.
    """
    found = [version for version, ops in lists.items() if op in set(ops[device])]
    if not found:
        return "."
    return "all" if len(found) == len(lists) else ", ".join(found)


def ops_reference(lists: Mapping[str, Mapping[str, Iterable[str]]]) -> str:
    """Returns the page.

    Args:
        lists: As for :func:`versions_of`; docs/site/torch_ops.json has them.
    """
    from fastamp.policies import table

    sets = {v: {d: frozenset(ops[d]) for d in DEVICES} for v, ops in lists.items()}
    lines = [INTRO, f"Versions compared: {', '.join(lists)}.\n"]
    lines += ["| Op | CPU | CUDA | torch, CPU | torch, CUDA |", "|---|---|---|---|---|"]
    for row in sorted(table(), key=lambda row: row.op):
        versions = " | ".join(versions_of(row.op, device, sets) for device in DEVICES)
        lines.append(f"| `{row.op}` | {row.cpu_default} | {row.cuda_default} | {versions} |")
    return "\n".join(lines) + "\n"
