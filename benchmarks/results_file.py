# SPDX-License-Identifier: Apache-2.0
"""Results on disk: raw samples with the environment they were taken in, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.harness import Result

FOLDER = ROOT / "benchmarks" / "results"
# What must be equal for rows of two files to stand in one.
MACHINE = ("gpu", "cpu", "revision", "torch")


def default_path(environment: dict[str, str]) -> Path:
    """Returns the name of a full run: date, revision, kind of machine."""
    machine = "cpu" if environment["gpu"] == "none" else environment["gpu"].replace(" ", "-")
    return FOLDER / f"{environment['date'][:10]}-{environment['revision']}-{machine}.json"


def _row(result: Result) -> dict[str, object]:
    """Returns a row as it is written: five digits are more than any sample is worth."""
    row = {**asdict(result), "repeats": result.repeats}
    row["samples"] = {
        name: [float(f"{sample:.5g}") for sample in samples]
        for name, samples in result.samples.items()
    }
    return row


def save(path: Path, environment: dict[str, str], results: list[Result], notes: list[str]) -> None:
    """Writes a result, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(_row(result)) for result in results)
    head = json.dumps({"environment": environment, "notes": notes}, indent=1)[:-2]
    beside = path.with_suffix(".part")
    beside.write_text(f'{head},\n "rows": [\n{lines}\n]\n}}\n', encoding="utf-8")
    beside.replace(path)


def load(path: Path) -> tuple[dict[str, str], list[Result], list[str]]:
    """Reads what save() wrote: environment, results, notes."""
    document = json.loads(path.read_text(encoding="utf-8"))
    results = []
    for row in document["rows"]:
        row.pop("repeats", None)  # for readers of the file: it is the number of samples
        results.append(Result(**row))
    for result in results:
        result.curve = None if result.curve is None else (result.curve[0], result.curve[1])
        result.passes = [(name, count) for name, count in result.passes]
        result.work = None if result.work is None else (result.work[0], result.work[1])
    return document["environment"], results, document["notes"]
