# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp bisect``."""

from __future__ import annotations

import json

import pytest

from fastamp._cli import bisect_command
from support.children import run_program

PROGRAM = """
import torch
from torch import nn

class RMSNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), RMSNorm(), nn.Linear(64, 8))
x, y = torch.randn(16, 64) * GAIN, torch.arange(16) % 8

def step():
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    loss.backward()

def bisected():
    return step, model

def noisy():
    def random_step():
        x.copy_(torch.randn(16, 64, generator=generator))
        step()
    generator = torch.Generator()
    return random_step, model

def crashing():
    def crash():
        raise RuntimeError("planted")
    return crash, model

def wrong():
    return step

if __name__ == "__main__":
    step()
    print("finite", all(p.grad.isfinite().all().item() for p in model.parameters()),
          "zero", any(not p.grad.any() for p in model.parameters()))
"""


def run(tmp_path, *arguments, gain=3000.0):
    (tmp_path / "train.py").write_text(PROGRAM.replace("GAIN", str(gain)))
    return run_program("-m", "fastamp", *arguments, cwd=tmp_path)


def test_the_policy_file_that_it_writes_cures_the_program(tmp_path):
    options = ("--policy", "policy.toml", "--json", "found.json")
    done = run(tmp_path, "bisect", "train:bisected", *options)
    assert done.returncode == 1, done.stderr
    assert "pow.Tensor_Scalar" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(each["op"], each["module"]) for each in found["ops"]] == [("pow.Tensor_Scalar", "1")]
    assert found["runs"] <= 12
    assert "zero True" in run(tmp_path, "train.py").stdout
    cured = run(tmp_path, "--policy", "policy.toml", "train.py")
    assert "finite True zero False" in cured.stdout, cured.stderr
    assert not cured.stderr


def test_a_healthy_program_has_exit_status_0(tmp_path):
    done = run(tmp_path, "bisect", "train:bisected", "--json", "-", gain=1.0)
    assert done.returncode == 0, done.stderr
    assert "Nothing has to run in fp32" in done.stderr
    assert json.loads(done.stdout)["fastamp"]["report"] == "bisect"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("train:noisy",), "gives the same gradients each time"),
        (
            ("train:wrong", "--policy", "policy.toml"),
            "expected train:wrong to return a step and a model, got",
        ),
        (("train:absent",), "expected train:absent to be there"),
        (("train",), "expected MODULE:CALLABLE, got 'train'"),
        ((".train:bisected",), "expected MODULE:CALLABLE, got '.train:bisected'"),
        (("train.py:bisected",), "such as train, got the file 'train.py'"),
        (("train:bisected", "--agree", "2"), "expected agree above 0 and below 1"),
        (("train:bisected", "--policy", "absent/p.toml"), "No such file"),
    ],
)
def test_refusals_have_exit_status_2_and_no_traceback(tmp_path, arguments, text):
    done = run(tmp_path, "bisect", *arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.toml"))


def test_what_is_no_function_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        bisect_command.main(["sys:path"])
    assert ended.value.code == 2
    assert "expected sys:path to be a function, got list" in capsys.readouterr().err


def test_what_the_step_raises_comes_through(tmp_path):
    done = run(tmp_path, "bisect", "train:crashing")
    assert done.returncode == 1
    assert "RuntimeError: planted" in done.stderr
    assert "crash()" in done.stderr or "in crash" in done.stderr
