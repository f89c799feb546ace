# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp --inspect``: one step of a program as it is."""

from __future__ import annotations

import json
import sys

import pytest

import fastamp
from fastamp import _cli
from support.children import run_program

PROGRAM = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=SCALED)
for step in range(4):
    x = torch.full((4, 8), float(step + 1))
    with torch.autocast("cpu", dtype=torch.float16 if SCALED else torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), torch.arange(4))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(step, [round(p.double().sum().item(), 9) for p in model.parameters()])
"""


def run(tmp_path, *options, scaled=True):
    (tmp_path / "train.py").write_text(PROGRAM.replace("SCALED", str(scaled)))
    return run_program("-m", "fastamp", *options, "train.py", cwd=tmp_path)


@pytest.mark.parametrize("scaled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_step_is_written_and_the_program_goes_on_with_the_same_numbers(tmp_path, scaled):
    plain = run(tmp_path, scaled=scaled)
    done = run(tmp_path, "--inspect", "step.json", "--at-step", "2", scaled=scaled)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert "fastamp: step 2 is in" in done.stderr
    record = json.loads((tmp_path / "step.json").read_text())
    products = [row for row in record["ops"] if row["op"] == "addmm" and not row["backward"]]
    assert {row["module"] for row in products} == {"0", "2"}
    assert all(row["calls"] == 1 for row in products)
    first = next(row for row in record["ops"] if row["module"] == "0" and row["op"] == "_to_copy")
    assert first["greatest"] == 3.0  # of x at step 2
    assert [row["name"] for row in record["weights"]] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    assert (record["loss_scale"] is not None) == scaled
    if scaled:
        assert record["loss_scale"]["scale"] == 16.0


@pytest.mark.slow
def test_pages_tables_and_the_terminal(tmp_path):
    assert run(tmp_path, "--inspect", "step.html").returncode == 0
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")
    assert run(tmp_path, "--inspect", "step.txt").returncode == 0
    assert "Ops: what ran in which dtype, and why" in (tmp_path / "step.txt").read_text()
    shown = run(tmp_path, "--inspect", "-").stdout
    assert "Loss scale" in shown


@pytest.mark.slow
def test_a_step_that_never_comes_is_said(tmp_path):
    done = run(tmp_path, "--inspect", "step.json", "--at-step", "9")
    assert "step 9 was not inspected: the program ended after 4 steps" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--at-step", "2"], "expected --inspect FILE with --at-step, got none"),
        (["--inspect", "a.json", "--at-step", "x"], "expected --at-step with a number"),
        (["--inspect", "no/such/folder.json"], "--inspect: "),
    ],
)
def test_bad_options_are_refused(options, text, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fastamp", *options, "train.py"])
    with fastamp.install(), pytest.raises(SystemExit) as ended:
        _cli.main()
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
