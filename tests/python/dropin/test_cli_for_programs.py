# SPDX-License-Identifier: Apache-2.0
"""What the command line gives to other programs: JSON, exit statuses, reports for issues."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

import fastamp
from fastamp import _cli
from fastamp._cli import info_command, ops_command, report_bug_command
from support.children import run_program

PROGRAM = """
import os, sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(3):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(torch.ones(4, 8)), torch.arange(4))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(type(optimizer).__module__, [round(p.double().sum().item(), 9) for p in model.parameters()])
"""
GUIDE = Path(__file__).resolve().parents[3] / "docs" / "commands.md"


def run(tmp_path, *arguments, text=PROGRAM):
    (tmp_path / "train.py").write_text(text)
    return run_program("-m", "fastamp", *arguments, cwd=tmp_path)


def head_of(text):
    return json.loads(text)["fastamp"]


def test_json_says_which_tool_which_layout_and_which_version(capsys):
    info_command.main(["--no-probe", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["fastamp"] == {"report": "info", "layout": 1, "version": fastamp.__version__}
    assert record["versions"]["fastamp"] == fastamp.__version__
    ops_command.main(["--json", "--device", "cpu"])
    record = json.loads(capsys.readouterr().out)
    assert record["fastamp"]["report"] == "ops"
    assert {"op": "mm", "cpu": "lower"} in record["ops"]
    ops_command.main(["--json", "softmax.int"])
    record = json.loads(capsys.readouterr().out)
    assert record["ops"] == [{"op": "softmax.int", "cpu": "pass", "cuda": "set_opt_dtype"}]
    assert record["calls"] == []
    ops_command.main(["--json", "relu"])  # autocast has no policy for it, as the text says
    record = json.loads(capsys.readouterr().out)
    assert record["ops"] == [{"op": "relu", "cpu": "pass", "cuda": "pass"}]
    ops_command.main(["--json", "FlashAttnFunc"])
    record = json.loads(capsys.readouterr().out)
    assert record["ops"] == []
    assert record["calls"][0]["call"] == "flash_attn.flash_attn_interface.FlashAttnFunc"
    assert record["calls"][0]["arguments"] == ["q", "k", "v"]
    with pytest.raises(SystemExit) as ended:
        ops_command.main(["--json", "no_such_op"])
    assert ended.value.code == 1
    with fastamp.debug.trace() as t:
        pass
    assert head_of(t.to_json())["report"] == "trace"


def test_the_guide_names_the_layouts_and_their_keys():
    from fastamp._debug.report import LAYOUT

    text = GUIDE.read_text(encoding="utf-8")
    assert f"layout {LAYOUT}" in text
    kinds = "check rules inspect bisect trace info ops export compare merge report-bug"
    for kind in kinds.split():
        assert f"| `{kind}` |" in text
    for command in _cli._COMMANDS:
        assert command.startswith("-") or f"| `python -m fastamp {command}" in text
    for option in _cli._OPTIONS:
        assert f"`{option}" in text or option == "--float8-exclude"
    report = json.loads(fastamp.debug.check(__import__("torch").nn.Linear(2, 2)).to_json())
    row = next(line for line in text.splitlines() if line.startswith("| `check` |"))
    assert set(report) - {"fastamp"} == set(re.findall(r"`(\w+)`:", row))


def test_a_report_of_a_failed_run_has_its_place_and_no_secrets(tmp_path):
    secret = "hunter2"
    failing = PROGRAM + f"raise ValueError(f'bad {{torch.ones(2)}} in /home/{secret}/data/x.bin')\n"
    (tmp_path / "train.py").write_text(failing)
    done = run_program(
        *("-m", "fastamp", "report-bug", "--output", "r.md", "--steps", "0", "train.py"),
        f"--token={secret}",
        cwd=tmp_path,
        SOME_KEY=secret,
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "r.md").read_text()
    last = len(failing.splitlines())
    assert f"train.py:{last} in <module>\nValueError: bad tensor(...) in" in text
    assert "0 findings" in text
    assert f"torch: {__import__('torch').__version__}" in text
    assert str(tmp_path) not in text
    assert "--token" not in text
    again = run_program("-m", "fastamp", "report-bug", "--output", "r.md", cwd=tmp_path)
    assert again.returncode == 2
    assert "expected --output FILE that is not there yet, got r.md" in again.stderr


def test_each_rank_writes_a_report_of_its_own(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM + "raise ValueError(os.environ['RANK'])\n")
    command = ("-m", "fastamp", "report-bug", "--output", "out/r.md", "--steps", "0", "train.py")
    (tmp_path / "out").mkdir()
    for rank in "01":
        done = run_program(*command, cwd=tmp_path, RANK=rank, WORLD_SIZE="2")
        assert done.returncode == 0, done.stderr
        assert f"the report is in out/r.rank{rank}.md; read it" in done.stdout
        assert f"ValueError: {rank}\n" in (tmp_path / f"out/r.rank{rank}.md").read_text()
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "r.rank0.md",
        "r.rank1.md",
    ]
    again = run_program(*command, cwd=tmp_path, RANK="1", WORLD_SIZE="2")
    assert again.returncode == 2
    assert "expected --output FILE that is not there yet, got out/r.rank1.md" in again.stderr
    alone = run_program(*command, cwd=tmp_path, RANK="0", WORLD_SIZE="1")
    assert "the report is in out/r.md; read it" in alone.stdout


def test_a_report_without_a_program_tells_versions(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        report_bug_command.main([])
    assert ended.value.code == 0
    assert "read it before you send it" in capsys.readouterr().out
    assert "## versions" in (tmp_path / "fastamp-report.md").read_text()


def test_a_report_is_data_if_its_name_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        report_bug_command.main(["--output", "r.json"])
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["fastamp"]["report"] == "report-bug"
    assert f"fastamp: {fastamp.__version__}" in record["versions"]


def test_json_has_no_numbers_that_it_cannot_have():
    from fastamp._debug.report import json_of

    def refuse(name):
        raise AssertionError(name)

    text = json_of("bisect", {"a": [math.inf, -math.inf, math.nan], "b": {1: 2.0}})
    record = json.loads(text, parse_constant=refuse)
    assert record["a"] == ["inf", "-inf", "nan"]
    assert record["b"] == {"1": 2.0}


def test_a_run_is_logged_and_fused_from_the_command_line(tmp_path):
    plain = run(tmp_path, "train.py").stdout
    done = run(tmp_path, "--log-to", "run.jsonl", "--fuse", "train.py")
    assert plain.startswith("torch.optim")
    assert done.stdout.startswith("fastamp.optim")
    assert done.stdout.partition(" ")[2] == plain.partition(" ")[2]
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["amp/scale"] for row in rows] == [16.0] * 3


def test_a_policy_file_takes_the_names_that_pages_show(tmp_path):
    (tmp_path / "p.toml").write_text('[ops]\ngelu = "fp32"\n')
    text = "import torch\nmodel = torch.nn.GELU()\nx = torch.ones(2).half()\n" + (
        'with torch.autocast("cpu", dtype=torch.float16):\n    print(model(x).dtype)\n'
    )
    assert run(tmp_path, "train.py", text=text).stdout == "torch.float16\n"
    assert run(tmp_path, "--policy", "p.toml", "train.py", text=text).stdout == "torch.float32\n"
    (tmp_path / "p.toml").write_text('[ops]\ngeluu = "fp32"\n')
    refused = run(tmp_path, "--policy", "p.toml", "train.py", text=text)
    assert refused.returncode == 2
    assert "p.toml, line 2: expected op to name an op of the table, got 'geluu'" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        (["--log-to", "no/such/run.jsonl", "x.py"], "--log-to: [Errno 2]"),
        (["--bogus", "x.py"], "unknown option --bogus"),
        (["--at-step", "x", "x.py"], "expected --at-step with a number, at least 0, got 'x'"),
    ],
)
def test_what_is_wrong_with_options_is_the_last_line(arguments, last, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fastamp", *arguments])
    with fastamp.install(), pytest.raises(SystemExit) as ended:
        _cli.main()
    assert ended.value.code == 2
    assert last in capsys.readouterr().err.splitlines()[-1]
