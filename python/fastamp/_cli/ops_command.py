# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp ops``: what autocast does with each op."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any

import torch

from fastamp._debug.report import json_of
from fastamp._install.attention_libraries import CALLS, LibraryCall, state_of
from fastamp._policy.table import OpTableRow, op_table

_MEANINGS = {
    "pass": "runs in the dtypes it is given",
    "lower": "floating arguments are cast to the region's dtype",
    "lower_dense": "floating arguments are cast as by lower, or with a sparse one to float32",
    "fp32": "floating arguments are cast to float32",
    "set_opt_dtype": "runs in float32 unless the caller names a dtype",
    "append_dtype": "runs with dtype=float32 added",
    "promote": "floating arguments are cast to the widest dtype among them",
    "banned": "refused; the message names what to use instead",
    "unify": "runs in the dtypes it is given; if it refuses a mix, in one of them",
}


def main(arguments: list[str]) -> None:
    """Prints the list, or one op; exits with 1 if there is no op of that name."""
    parser = argparse.ArgumentParser(prog="python -m fastamp ops", description=__doc__)
    parser.add_argument(
        "name", nargs="?", help="an op, such as mm, softmax.int or conv1d.*, or a library"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this device's column")
    parser.add_argument("--json", action="store_true", help="print it as data")
    options = parser.parse_args(arguments)
    devices = [options.device] if options.device else ["cpu", "cuda"]
    if options.json:
        print(json_of("ops", _as_data(options.name, devices)))
    elif options.name is None:
        _print_list(devices)
    else:
        _print_ops(options.name, devices)


def _as_data(name: str | None, devices: list[str]) -> dict[str, Any]:
    rows, calls = (op_table(), list(CALLS)) if name is None else _found(name)
    ops = [{"op": row.op, **{device: getattr(row, device) for device in devices}} for row in rows]
    if not rows and not calls:
        ops = [{"op": name, **dict.fromkeys(devices, "pass")}]
    data = [{"call": c.path, "arguments": list(c.tensors), "state": state_of(c)} for c in calls]
    return {"ops": ops, "calls": data}


def _found(name: str) -> tuple[list[OpTableRow], list[LibraryCall]]:
    """Returns what has a name; nothing if autocast has no policy for it. Exits if there is none."""
    wanted = _bare(name)
    rows = _rows_named(name)
    calls = [call for call in CALLS if wanted in (*call.path.split("."), call.path, *call.ops)]
    if not rows and not calls and not hasattr(torch.ops.aten, wanted.partition(".")[0]):
        _refuse_name(name, wanted)
    return rows, calls


def _bare(name: str) -> str:
    return name.removeprefix("aten::").removesuffix(".*")


def _rows_named(name: str) -> list[OpTableRow]:
    """Returns all overloads of a bare name, so that none is mistaken for the whole op."""
    wanted = _bare(name)
    if wanted.endswith(".default"):
        return [row for row in op_table() if row.op == wanted.removesuffix(".default")]
    return [row for row in op_table() if wanted in (row.op, row.op.partition(".")[0])]


def _difference(row: OpTableRow, device: str) -> str:
    """Returns how an op differs from torch's on a device; empty where it does not."""
    now, default = getattr(row, device), getattr(row, f"{device}_default")
    if now != default:
        return f"torch: {default}"
    if now == "promote":
        return "torch refuses float16 with bfloat16; here they run in float32"
    return ""


def _print_list(devices: list[str]) -> None:
    rows = op_table()
    header = ("op", *devices, "difference from torch")
    lines: list[tuple[str, ...]] = [header]
    for row in rows:
        policies = tuple(getattr(row, device) for device in devices)
        if set(policies) == {"pass"} and not any(_difference(row, device) for device in devices):
            continue
        notes = dict.fromkeys(filter(None, (_difference(row, device) for device in devices)))
        lines.append((row.op, *policies, "; ".join(notes)))
    _print_table(lines)
    print(f"\n{len(lines) - 1} ops; every other op runs in the dtypes it is given.")
    print("\nCalls of other libraries that are lower where the library would refuse them:\n")
    calls = [(call.path, ", ".join(call.tensors), state_of(call)) for call in CALLS]
    _print_table([("call", "arguments", "state"), *calls])
    print("\nPolicies:\n")
    shown = {policy for line in lines[1:] for policy in line[1:-1]}
    for policy in [each for each in _MEANINGS if each in shown]:
        print(f"  {policy}: {_MEANINGS[policy]}")


def _print_table(lines: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        print("  ".join((*cells, line[-1])).rstrip())


def _print_ops(name: str, devices: list[str]) -> None:
    rows, calls = _found(name)
    if not rows and not calls:
        print(f"{_bare(name)}\n  autocast has no policy for it: runs in the dtypes it is given")
    for call in calls:
        _print_call(call)
    for row in rows:
        print(row.op)
        for device in devices:
            policy = getattr(row, device)
            print(f"  {device + ':':5} {policy} - {_MEANINGS[policy]}")
            difference = _difference(row, device)
            print(f"        {'differs: ' + difference if difference else 'as torch'}")


def _print_call(call: LibraryCall) -> None:
    accepted = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in call.accepted))
    print(call.path)
    print(f"  lower - {', '.join(call.tensors)} are cast to the region's dtype")
    print(f"          unless they have one dtype of {accepted}, which the library takes")
    print(f"  state: {state_of(call)}")
    print(f"  see: {call.source}")


def _refuse_name(name: str, wanted: str) -> None:
    names = {row.op for row in op_table()} | {row.op.partition(".")[0] for row in op_table()}
    names |= {call.path for call in CALLS}
    near = difflib.get_close_matches(wanted.lower(), sorted(names), n=5, cutoff=0.5)
    hint = f"; nearest names: {', '.join(near)}" if near else ""
    sys.stderr.write(f"ops: expected an op that autocast acts on, got {name!r}{hint}\n")
    sys.exit(1)
