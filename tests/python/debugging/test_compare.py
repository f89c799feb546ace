# SPDX-License-Identifier: Apache-2.0
"""``compare`` names where two runs part, finds planted faults, and blames no rounding."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch

from debugging.compared_programs import FAULTS, recorded
from fastamp._debug.compare.comparison import compare_records
from fastamp._debug.compare.record import read_record
from fastamp._debug.compare.sketch import sketch_of

# The second run: what it may have that the first has not.
DTYPES = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16, scaled": {"dtype": torch.float16, "scale": 1024.0},
}
# Gradients in 16 bits are as far apart as these faults make an update of Adam, which takes signs.
SGD = {"a learning rate twice as high", "gradients that are clipped while scaled"}


@pytest.fixture(scope="module")
def right():
    return {sgd: recorded(sgd=sgd) for sgd in (False, True)}


def test_a_run_equals_itself(right):
    comparison = compare_records(right[False], recorded())
    assert comparison.divergence is None
    assert comparison.largest == 0.0
    assert comparison.only_first == comparison.only_second == 0
    assert "bit for bit" in str(comparison)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("sgd", [False, True])
def test_equal_runs_in_other_dtypes_raise_no_alarm(right, name, sgd):
    options = {**DTYPES[name], "sgd": sgd}
    for first, second in [(right[sgd], recorded(**options)), (recorded(**options), right[sgd])]:
        comparison = compare_records(first, second)
        assert comparison.divergence is None, str(comparison)
        assert comparison.matched > 80


def test_another_form_of_the_optimizer_raises_no_alarm(right):
    comparison = compare_records(right[False], recorded(foreach=True))
    assert comparison.divergence is None, str(comparison)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(right, fault, name):
    sgd = fault in SGD
    options = dict(DTYPES[name])
    if fault == "gradients that are clipped while scaled":
        options["scale"] = 1024.0
    comparison = compare_records(right[sgd], recorded(fault, sgd=sgd, **options))
    assert comparison.divergence is not None
    assert FAULTS[fault] in str(comparison)


def test_the_scale_of_the_loss_is_no_difference(right):
    comparison = compare_records(right[False], recorded(scale=2.0**12))
    assert comparison.divergence is None
    assert comparison.largest == 0.0


def test_a_sketch_has_about_the_distance_of_the_tensors():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1000, generator=generator)
    for apart in (1e-6, 1e-2, 1.0):
        y = x + apart * torch.randn(1000, generator=generator)
        true = float((x - y).norm() / max(x.norm(), y.norm()))
        assert sketch_of(x).distance(sketch_of(y)) == pytest.approx(true, rel=0.5)
    assert sketch_of(x.view(10, 100).t().contiguous().t()).sums == sketch_of(x).sums
    assert sketch_of(x).times(-3.0).sums == pytest.approx(sketch_of(-3.0 * x).sums, rel=1e-5)
    few = sketch_of(torch.tensor([1.0, math.inf, -2.0]))
    assert (few.sums, few.non_finite, few.norm) == ((1.0, 0.0, -2.0), 1, math.sqrt(5.0))


PROGRAM = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    with torch.autocast("cpu", enabled="low" in sys.argv):
        loss = model(torch.ones(2, 8) * (3.0 if "other" in sys.argv else 1.0)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(*arguments, cwd):
    command = [sys.executable, "-m", "fastamp", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_command_line(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    for name, *arguments in (("a",), ("b", "low"), ("c", "other")):
        done = run(
            "--record", f"{name}.json", "--at-step", "1", "train.py", *arguments, cwd=tmp_path
        )
        assert done.returncode == 0
        assert done.stderr == f"fastamp: step 1 is in {tmp_path / name}.json\n"
    assert read_record(tmp_path / "a.json").step == 1
    same = run("compare", "a.json", "b.json", cwd=tmp_path)
    assert same.returncode == 0
    assert "Rounding explains all differences" in same.stdout
    other = run("compare", "a.json", "c.json", cwd=tmp_path)
    assert other.returncode == 1
    assert "They part at: " in other.stdout
    bad = run("compare", "a.json", "train.py", cwd=tmp_path)
    assert bad.returncode == 2
    assert "a record that python -m fastamp --record has written" in bad.stderr
    data = run("compare", "--json", "-", "a.json", "c.json", cwd=tmp_path)
    assert data.returncode == 1
    record = json.loads(data.stdout)
    assert record["fastamp"]["report"] == "compare"
    assert record["divergence"]["what"] in other.stdout
    data = run("compare", "--json", "same.json", "a.json", "b.json", cwd=tmp_path)
    assert (data.returncode, data.stdout) == (0, same.stdout)
    assert json.loads((tmp_path / "same.json").read_text())["divergence"] is None
    few = run("compare", "a.json", cwd=tmp_path)
    assert few.returncode == 2
    assert few.stderr.endswith("expected two files\n")
