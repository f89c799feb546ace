# SPDX-License-Identifier: Apache-2.0
"""The C++ programs in examples/cpp, built against the installed package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from packaging_tools import ROOT, build_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # <torch/torch.h> takes long to compile


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    path = tmp_path_factory.mktemp("digits") / "digits.pt"
    subprocess.run([sys.executable, ROOT / "examples" / "data" / "digits.py", path], check=True)
    return path


def call(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # two that spin on one busy core take minutes
        capture_output=True,
        text=True,
        check=False,
    )


def run(program: Path, *arguments: object) -> str:
    done = call(program, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refusal(program: Path, *arguments: object) -> str:
    done = call(program, *arguments)
    assert done.returncode == 1
    return done.stderr


def test_a_convolutional_network_learns_digits(tmp_path, data):
    program = build_example(tmp_path, "cnn")
    # Few steps in float16: many CPUs have no float16 arithmetic: slow there.
    for mode, name, steps, least in (("bf16", "BFloat16", 100, 95), ("fp16", "Half", 15, 40)):
        output = run(program, data, mode, steps)
        accuracy = re.search(rf"^{name}: accuracy ([\d.]+) %$", output, re.MULTILINE)
        assert accuracy, output
        assert float(accuracy[1]) > least
    assert "usage: cnn DATA" in refusal(program)
    assert "expected fp16 or bf16, got fp8" in refusal(program, data, "fp8")
    assert "cannot read nowhere.pt" in refusal(program, "nowhere.pt")


def test_a_generator_and_a_critic_train_under_one_scaler(tmp_path, data):
    program = build_example(tmp_path, "dcgan")
    output = run(program, data, "fp16", 15)
    losses = re.search(r"^step 15: critic ([\d.]+), generator ([\d.]+)$", output, re.MULTILINE)
    assert losses, output
    assert 0.1 < float(losses[1]) < 1.35  # 2 ln 2 is the loss of a blind critic
    assert 0.1 < float(losses[2]) < 5
    assert len(output.splitlines()) == 9  # and a digit of 8 rows
