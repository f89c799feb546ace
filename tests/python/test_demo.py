# SPDX-License-Identifier: Apache-2.0
"""The demo, run for a few iterations from both languages: its tables say the truth."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.children import child_environment

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 20
CPU_ONLY = not torch.cuda.is_available()


def run_demo(folder, *options, columns="200"):
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "demo.py", "--folder", folder, *options],
        env=child_environment(COLUMNS=columns),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    result = run_demo(folder, "--iters", str(ITERATIONS))
    names = {"Python": "python.json", "C++": "cpp.json"}
    documents = {
        language: json.loads((folder / name).read_text()) for language, name in names.items()
    }
    return result, documents


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),  # the first run compiles the C++ program
]


@pytest.mark.parametrize("language", ["Python", "C++"])
def test_dtypes_are_those_that_fc1_saw(demo, language):
    rows = demo[1][language]["rows"]
    seen = {row["mode"]: (row["input"], row["output"], row["weight"]) for row in rows}
    assert seen == {
        "fp32": ("fp32", "fp32", "fp32"),
        "bf16": ("fp32", "bf16", "fp32"),
        "fp16 + GradScaler": ("fp32", "fp16", "fp32"),
        "fp8": ("fp32", "bf16", "fp32"),
    }


@pytest.mark.parametrize("language", ["Python", "C++"])
def test_rows_tell_iterations_scale_and_skipped_steps(demo, language):
    for row in demo[1][language]["rows"]:
        assert row["iterations"] == ITERATIONS
        scaled = row["mode"] == "fp16 + GradScaler"
        assert row["scale"] == (65536 if scaled else None)
        assert row["skipped"] == (0 if scaled else None)
        assert row["ms_per_iteration"] > 0
        assert 0 < row["accuracy"] <= 1


@pytest.mark.parametrize("language", ["Python", "C++"])
def test_every_mode_learns(demo, language):
    for row in demo[1][language]["rows"]:
        assert row["losses"]["1"] == pytest.approx(2.32, abs=0.05)
        assert row["final_loss"] < row["losses"]["1"] - 0.02
        assert row["final_loss"] == row["losses"][str(ITERATIONS)]


def test_python_and_cpp_have_equal_losses_as_printed(demo):
    python, native = (demo[1][language]["rows"] for language in ("Python", "C++"))
    assert f"{python[0]['final_loss']:.6f}" == f"{native[0]['final_loss']:.6f}"
    assert python[0]["losses"].keys() == native[0]["losses"].keys()
    for mark, loss in python[0]["losses"].items():
        assert f"{loss:.6f}" == f"{native[0]['losses'][mark]:.6f}"


def test_modes_have_losses_near_each_other_but_not_the_same(demo):
    for document in demo[1].values():
        fp32, bf16, fp16, fp8 = (row["final_loss"] for row in document["rows"])
        assert bf16 == pytest.approx(fp32, rel=1e-2)
        assert fp16 == pytest.approx(fp32, rel=1e-3)
        assert fp8 == pytest.approx(bf16, rel=5e-2)
        assert len({fp32, bf16, fp16, fp8}) == 4  # else autocast did nothing


def test_tables_of_both_languages_have_the_same_columns(demo):
    headers = re.findall(r"^mode .*$", demo[0].stdout, re.MULTILINE)
    assert len(headers) == 2
    assert headers[0].split() == headers[1].split()
    assert "fc1 input" in headers[0]
    assert "skipped" in headers[0]


@pytest.mark.skipif(not CPU_ONLY, reason="there is a GPU")
def test_it_says_that_there_is_no_gpu(demo):
    assert demo[0].stdout.count("no CUDA GPU, training on the CPU") == 2


def test_narrow_terminals_get_narrow_tables(tmp_path):
    output = run_demo(tmp_path, "--iters", "2", columns="60").stdout
    tables = [
        line for line in output.splitlines() if re.match(r"mode |fp32 |bf16 |fp16 |fp8 ", line)
    ]
    assert len(tables) > 8  # more than one block for each language
    assert max(map(len, tables)) <= 60


def test_until_loss_stops_at_the_loss(tmp_path):
    run_demo(tmp_path, "--iters", "600", "--until-loss", "2.2")
    for name in ("python.json", "cpp.json"):
        for row in json.loads((tmp_path / name).read_text())["rows"]:
            assert row["iterations"] == 100  # the first look at the loss that finds it below
            assert row["final_loss"] <= 2.2


def test_a_shorter_run_says_so_and_has_losses_where_the_others_have(tmp_path):
    data = tmp_path / "digits.pt"
    subprocess.run([sys.executable, ROOT / "examples" / "data" / "digits.py", data], check=True)
    words = ["--iters", "8", "--shorter", "fp16=4,fp8=2", "--marks", "1,2,4,8"]
    build = Path(os.environ.get("FASTAMP_BUILD_DIR", ROOT / "build" / "make"))
    programs = {
        "Python": [sys.executable, ROOT / "examples" / "python" / "digits.py"],
        "C++": [build / "examples" / "digits"],
    }
    for language, command in programs.items():
        json_file = tmp_path / f"{language}.json"
        done = subprocess.run(
            [*command, data, *words, "--json", json_file],
            env=child_environment(COLUMNS="200"),
            capture_output=True,
            text=True,
            check=True,
        )
        rows = json.loads(json_file.read_text())["rows"]
        assert [row["iterations"] for row in rows] == [8, 8, 4, 2]
        assert all("2" in row["losses"] for row in rows)
        assert "4 of 8" in done.stdout
        assert "2 of 8" in done.stdout
        # The progress begins with a loss that was computed.
        first = re.findall(r"loss=([\d.]+)", done.stderr)[0]
        assert float(first) > 2
