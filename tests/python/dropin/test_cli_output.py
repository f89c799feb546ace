# SPDX-License-Identifier: Apache-2.0
"""Where commands write: files, pages, pipes, one file for each rank."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
from fastamp._cli.output_file import OutputFile
from patience import patience
from support.children import child_environment

PROGRAM = (
    "import torch\nwith torch.autocast('cpu'):\n    torch.mm(torch.ones(2, 2), torch.ones(2, 2))\n"
)


def run(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = command.replace("fastamp", f"{sys.executable} -m fastamp", 1)
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=cwd,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=patience(300),
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "status"),
    [("fastamp ops | true", 141), ("fastamp check --list | true", 141)],
)
def test_output_that_nobody_reads_ends_silently(command: str, status: int, tmp_path: Path):
    done = run(command, tmp_path)  # The reader has gone long before torch is imported.
    assert done.returncode == status
    assert done.stderr == ""


def test_findings_as_data_are_alone_on_the_output(tmp_path: Path):
    (tmp_path / "train.py").write_text(f"{PROGRAM}print('trained')\n")
    done = run("fastamp check --json - train.py", tmp_path)
    said, _, data = done.stdout.partition("\n")
    assert said == "trained"
    assert {each["rule"] for each in json.loads(data)["findings"]} == set()
    assert "fastamp check: no optimizer step of train.py" in done.stderr
    (tmp_path / "train.py").write_text(PROGRAM)
    unread = run("fastamp check --json - train.py | true", tmp_path)
    assert unread.stderr == done.stderr
    assert unread.returncode == done.returncode == 0


def test_a_report_is_printed_or_a_page(tmp_path: Path):
    (tmp_path / "train.py").write_text(PROGRAM)
    printed = run("fastamp --report - train.py", tmp_path)
    assert printed.returncode == 0
    assert "mm" in printed.stdout
    assert "Total" in printed.stdout
    assert not (tmp_path / "-").exists()
    written = run("fastamp --report r.html train.py", tmp_path)
    assert written.returncode == 0
    assert written.stderr == f"fastamp: what autocast did is in {tmp_path / 'r.html'}\n"
    page = (tmp_path / "r.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<td>mm</td>" in page
    assert "train.py:3" in page


def test_a_page_of_a_trace_has_every_row():
    with fastamp.debug.trace(scaler=fastamp.GradScaler("cpu")) as trace, torch.autocast("cpu"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        torch.softmax(torch.ones(3), 0)
    page = trace.to_html()
    for row in trace.rows:
        assert f"<td>{row.op}</td>" in page
    assert "Scaler 1: scale 65536" in page


@pytest.mark.parametrize(
    ("rank", "size", "name"),
    [
        ("1", "2", "a.rank1.json"),
        ("0", "2", "a.rank0.json"),
        ("0", "1", "a.json"),
        ("", "", "a.json"),
    ],
)
def test_each_rank_has_a_file(rank, size, name, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    file = OutputFile(tmp_path / "a.json")
    file.put_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_that_cannot_be_written_is_found_out_at_once(tmp_path: Path):
    with pytest.raises(OSError, match="no"):
        OutputFile(tmp_path / "no" / "a.json")


def _report() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.123456)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()

    return fastamp.debug.inspect(step, model, optimizer)


@pytest.mark.parametrize("terminal", [False, True])
def test_numbers_are_never_cut(terminal, capsys, monkeypatch: pytest.MonkeyPatch):
    report = _report()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    report.print()
    shown = capsys.readouterr().out
    assert "\u2026" not in shown
    plain = re.sub("\x1b\\[[0-9;]*m", "", shown)
    numbers = {f"{row.update:.3g}" for row in report.weights}
    numbers |= {f"{row.error:.3g}" for row in report.gradients if row.error is not None}
    numbers |= {f"{row.local_cosine:.6f}" for row in report.ops if row.local_cosine is not None}
    assert numbers
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", plain), number
    if not terminal:
        assert plain == f"{report}\n"


def test_the_record_is_json(tmp_path: Path):
    report = _report()
    report.write(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["ops"]
