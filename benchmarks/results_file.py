"""Results on disk: raw samples with the environment they were taken in, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.harness import Result

FOLDER = ROOT / "benchmarks" / "results"


def default_path(environment: dict[str, str]) -> Path:
    """Returns the name of a full run: date, revision, kind of machine."""
    machine = "cpu" if environment["gpu"] == "none" else environment["gpu"].replace(" ", "-")
    return FOLDER / f"{environment['date'][:10]}-{environment['revision']}-{machine}.json"


def save(path: Path, environment: dict[str, str], results: list[Result], notes: list[str]) -> None:
    """Writes a result; nanoseconds are rounded to hundredths."""
    rows = []
    for result in results:
        row = asdict(result)
        row["samples"] = {
            name: [round(sample, 2) for sample in samples]
            for name, samples in result.samples.items()
        }
        rows.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps({"environment": environment, "notes": notes}, indent=1)[:-2]
    path.write_text(f'{head},\n "rows": [\n{lines}\n]\n}}\n', encoding="utf-8")


def load(path: Path) -> tuple[dict[str, str], list[Result], list[str]]:
    """Reads what save() wrote: environment, results, notes."""
    document = json.loads(path.read_text(encoding="utf-8"))
    results = [Result(**row) for row in document["rows"]]
    return document["environment"], results, document["notes"]
