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
    command = re.sub(r"\bfastamp\b", f"{sys.executable} -m fastamp", command, count=1)
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


@pytest.mark.parametrize(
    "command",
    ["fastamp ops >&-", "fastamp check --json - train.py >&-", "fastamp --report - train.py >&-"],
)
def test_an_output_that_is_closed_is_no_error(command: str, tmp_path: Path):
    (tmp_path / "train.py").write_text(PROGRAM)
    done = run(command, tmp_path)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "not written" not in done.stderr


def test_an_output_that_is_full_is_named(tmp_path: Path):
    done = run("fastamp ops > /dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr == "python -m fastamp: [Errno 28] No space left on device\n"


NAMED = """\
import torch
class Gr\u00f6\u00dfe(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1e6
model = Gr\u00f6\u00dfe(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
with torch.autocast("cpu", dtype=torch.float16):
    loss = model(torch.ones(2, 2)).float().sum()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
"""


@pytest.mark.parametrize("option", ["check", "--inspect -"])
def test_names_that_an_output_cannot_encode_are_escaped(option: str, tmp_path: Path):
    (tmp_path / "train.py").write_text(NAMED, encoding="utf-8")
    done = run(f"PYTHONIOENCODING=ascii fastamp {option} train.py", tmp_path)
    assert r"mul.Tensor in Gr\xf6\xdfe" in done.stdout or r"in Gr\xf6\xdfe" in done.stdout
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["/dev/stdout", "out.txt"])
def test_the_file_that_the_output_goes_to_is_not_cut(name: str, tmp_path: Path):
    (tmp_path / "train.py").write_text(f"{PROGRAM}print('trained')\n")
    done = run(f"fastamp --report {name} train.py > out.txt", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    said, _, table = (tmp_path / "out.txt").read_text().partition("\n")
    assert said == "trained"
    assert "Total" in table


def test_who_reads_a_named_pipe_gets_the_report(tmp_path: Path):
    (tmp_path / "train.py").write_text(PROGRAM)
    done = run("mkfifo pipe; cat pipe & fastamp --report pipe train.py; wait", tmp_path)
    assert done.returncode == 0
    assert "Total" in done.stdout


LOGGED = """\
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for _ in range(2):
    scaler.scale(model(torch.ones(2, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_rows_of_a_log_are_printed_or_in_one_file_for_each_rank(tmp_path: Path):
    (tmp_path / "train.py").write_text(LOGGED)
    printed = run("fastamp --log-to - train.py", tmp_path)
    assert [json.loads(line)["step"] for line in printed.stdout.splitlines()] == [0, 1]
    assert not (tmp_path / "-").exists()
    for rank in (0, 1):
        (tmp_path / f"run.rank{rank}.jsonl").write_text("of an earlier run\n")
        done = run(f"RANK={rank} WORLD_SIZE=2 fastamp --log-to run.jsonl train.py", tmp_path)
        assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run.jsonl").exists()
    for rank in (0, 1):
        rows = (tmp_path / f"run.rank{rank}.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [0, 1]


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
