# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp check``: programs as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fastamp
from fastamp._cli import check_command
from fastamp._debug.check import RULES
from support.children import run_program

RIGHT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(STEPS):
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), torch.arange(4))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print("step", step)
"""
WRONG = RIGHT.replace("    scaler.unscale_(optimizer)\n", "")


def run(tmp_path: Path, text: str, *options: str, steps: int = 5, program: str = "train.py"):
    (tmp_path / "train.py").write_text(text.replace("STEPS", str(steps)))
    return run_program("-m", "fastamp", "check", *options, program, cwd=tmp_path)


def test_a_right_program_passes_after_three_steps(tmp_path):
    done = run(tmp_path, RIGHT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "step 0",
        "step 1",
        "step 2",
        "fastamp check: 3 optimizer steps of train.py",
        "0 findings",
    ]


def test_findings_are_printed_and_written_and_give_status_1(tmp_path):
    done = run(tmp_path, WRONG, "--json", "found.json", "--steps", "2")
    assert done.returncode == 1
    assert "clip-before-unscale" in done.stdout
    assert "fix: scaler.unscale_(optimizer) before clipping" in done.stdout
    assert "1 finding of 1 rule" in done.stdout
    record = json.loads((tmp_path / "found.json").read_text())
    assert [f["rule"] for f in record["findings"]] == ["clip-before-unscale"]
    silent = run(tmp_path, WRONG, "--ignore", "clip-before-unscale")
    assert silent.returncode == 0
    assert "0 findings; ignored: clip-before-unscale" in silent.stdout


def in_thread(text: str, how: str) -> str:
    body = "".join(f"    {line}\n" for line in text.splitlines())
    return f"def train():\n{body}{how}print('after')\n"


@pytest.mark.parametrize(
    "how",
    [
        "from threading import Thread\nthread = Thread(target=train)\n"
        "thread.start()\nthread.join()\n",
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor() as pool:\n    pool.submit(train).exception()\n",
    ],
)
def test_a_program_that_trains_in_a_thread_is_ended_there_without_a_traceback(tmp_path, how):
    done = run(tmp_path, in_thread(WRONG, how))
    assert "step 2" in done.stdout
    assert "step 3" not in done.stdout
    assert "fastamp check: 3 optimizer steps of train.py" in done.stdout
    assert "clip-before-unscale" in done.stdout
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


def test_skipped_steps_are_steps_too(tmp_path):
    """A program whose loss scale collapses would otherwise never be ended."""
    done = run(tmp_path, RIGHT.replace("model(x)", "model(x * 1e30)"))
    assert "step 3" not in done.stdout
    assert (
        "fastamp check: 3 optimizer steps (3 skipped by the gradient scaler) of train.py"
        in done.stdout
    )


def test_steps_before_an_error_are_counted(tmp_path):
    done = run(tmp_path, RIGHT.replace('print("step", step)', "assert step < 1, 'too late'"))
    assert done.returncode == 1
    assert "fastamp check: 2 optimizer steps of train.py\n0 findings" in done.stdout
    assert done.stderr.rstrip().endswith("AssertionError: too late")


@pytest.mark.slow
def test_a_program_may_run_to_its_end(tmp_path):
    done = run(tmp_path, RIGHT, "--steps", "0", steps=4)
    assert "step 3" in done.stdout
    assert "4 optimizer steps" in done.stdout
    assert done.returncode == 0


@pytest.mark.slow
def test_places_are_named_by_module(tmp_path):
    model = "model[0].weight.data *= 3000; model[1] = nn.Softmax(-1)"
    done = run(tmp_path, RIGHT.replace("optimizer = ", f"{model}\noptimizer = "), "--steps", "2")
    assert "softmax-in-16-bits" in done.stdout
    assert "at _softmax in 1: logits up to" in done.stdout


@pytest.mark.slow
def test_a_program_that_fails_is_reported_on_all_the_same(tmp_path):
    done = run(tmp_path, WRONG + "    raise KeyError('broken')\n")
    assert "clip-before-unscale" in done.stdout
    assert "KeyError: 'broken'" in done.stderr
    assert done.returncode == 1
    left = run(tmp_path, RIGHT + "    raise SystemExit(7)\n")
    assert left.returncode == 7


def test_a_program_that_does_not_train_is_not_called_checked(capsys):
    try:
        with pytest.raises(SystemExit) as ended:
            check_command.main(["-c", "print('no training')"])
    finally:
        fastamp.uninstall()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out == "no training\nfastamp check: no optimizer step of -c\n0 findings\n"


def test_rules_are_listed(capsys):
    with pytest.raises(SystemExit) as ended:
        check_command.main(["--list"])
    assert ended.value.code == 0
    assert "clip-before-unscale\n  why: " in capsys.readouterr().out


def test_rules_are_listed_as_data(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        check_command.main(["--list", "--json", "-"])
    assert ended.value.code == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fastamp"]["report"] == "rules"
    assert [tuple(rule.values()) for rule in data["rules"]] == [*map(tuple, RULES.values())]
    assert list(data["rules"][0]) == ["name", "reason", "fix", "needs_step"]
    file = tmp_path / "rules.json"
    with pytest.raises(SystemExit):
        check_command.main(["--json", str(file), "--list"])
    assert "clip-before-unscale\n  why: " in capsys.readouterr().out
    assert json.loads(file.read_text()) == data


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--list", "x.py"], "expected --list with --json FILE or alone, got --list x.py"),
        (["--steps", "2", "--list"], "got --steps 2 --list"),
        (["--list", "--json", "no/such/folder.json"], "--json: "),
        (["--ignore", "clip", "x.py"], "expected ignore to name rules, got 'clip'"),
        (["--ignore", "zz", "x.py"], "got 'zz'; python -m fastamp check --list shows their names"),
        (["--steps", "x", "x.py"], "expected --steps with a number, at least 0, got 'x'"),
        (["--json", "no/such/folder.json", "x.py"], "--json: "),
        (["--what", "x.py"], "unknown option --what"),
        (["--steps"], "expected a value after --steps"),
        ([], "expected a program, got none"),
    ],
)
def test_bad_options_are_refused(options, text, capsys):
    with pytest.raises(SystemExit) as ended:
        check_command.main(options)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


UNSCALED = """
import torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
GUARD
for step in range(2):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(8, 8)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("guarded", [False, True])
def test_a_guard_is_recommended_where_there_is_no_scaler(tmp_path, guarded):
    make = "import fastamp; guard = fastamp.StepGuard(optimizer)" if guarded else ""
    done = run(tmp_path, UNSCALED.replace("GUARD", make), "--json", "found.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("2 optimizer steps of train.py\n0 findings\n")
    advice = json.loads((tmp_path / "found.json").read_text())["advice"]
    assert len(advice) == (not guarded)
    assert ("fastamp check: advice: no scaler checks" in done.stdout) is not guarded
    assert all("fastamp.StepGuard(optimizer)" in text for text in advice)
