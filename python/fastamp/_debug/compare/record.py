# SPDX-License-Identifier: Apache-2.0
"""The record of a step, as the file that it is."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from fastamp._debug.compare.sketch import Sketch

_FORMAT = "fastamp record"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that a step has come to, in the order of time.

    Attributes:
        kind: "start": a parameter before the step; "op": a call of an op; "gradient": that of a
            parameter, as backward left it; "end": a parameter after the step.
        name: Of the module, empty outside of modules; else of the parameter.
        op: Of the op.
        backward: Whether a backward pass ran it.
        inputs: The tensors that an op was given.
        outputs: What it returned or wrote; or the parameter or gradient.
        noise: How far the output is from what fp32 would have had, relative to it, in this run.
        random: Whether the op draws numbers.
        unsure: Share of a gradient's elements that rounding could have given the other sign.
    """

    kind: str
    name: str
    op: str = ""
    backward: bool = False
    inputs: tuple[Sketch, ...] = ()
    outputs: tuple[Sketch, ...] = ()
    noise: float = 0.0
    random: bool = False
    unsure: float = 0.0

    @property
    def key(self) -> tuple[str, str, str, bool]:
        """Key that events of two runs have in common that are the same; calls in the same order."""
        return self.kind, self.name, self.op, self.backward


@dataclasses.dataclass(frozen=True)
class Record:
    """Record that ``python -m fastamp --record FILE`` writes.

    Attributes:
        torch: Its version.
        rank: Of the process.
        ranks: How many train together.
        step: Number of the step.
        scale: Of the loss: gradients are multiplied by it.
        skipped: Whether a scaler skipped the step.
        events: In the order of time.
    """

    torch: str
    rank: int
    ranks: int
    step: int
    scale: float
    skipped: bool
    events: tuple[Event, ...]

    def as_json(self) -> str:
        """Returns the text of the file: a line for the run, then one for each event."""
        head = {"format": _FORMAT, "version": _VERSION}
        head |= {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "events"
        }
        return "\n".join([json.dumps(head), *(json.dumps(_row(e)) for e in self.events), ""])


def _row(event: Event) -> dict[str, Any]:
    row = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
    row["inputs"] = [sketch.as_list() for sketch in event.inputs]
    row["outputs"] = [sketch.as_list() for sketch in event.outputs]
    always = ("kind", "name")
    return {name: value for name, value in row.items() if value or name in always}


def _event(row: Any) -> Event:
    for side in ("inputs", "outputs"):
        row[side] = tuple(Sketch.from_list(each) for each in row.get(side, []))
    return Event(**row)


def read_record(path: str | os.PathLike[str]) -> Record:
    """Reads a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no record, or one of another version.
    """
    expected = f"compare: expected a record that python -m fastamp --record has written, got {path}"
    try:
        head, *lines = Path(path).read_text(encoding="utf-8").splitlines()
        values = json.loads(head)
        if values.pop("format") != _FORMAT:
            raise ValueError("another format")
        version = values.pop("version")
        if version != _VERSION:
            raise ValueError(f"version {version}, not {_VERSION}")
        return Record(**values, events=tuple(_event(json.loads(line)) for line in lines))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{expected}: {error}") from error
