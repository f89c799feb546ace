# SPDX-License-Identifier: Apache-2.0
"""python -m fastamp export: the same as fastamp.inference.export from the shell."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from support.children import run_program

MODULE = """
import torch

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    return model.eval(), (torch.ones(2, 8),)

def wrong():
    return 3

def narrow():
    return torch.nn.Linear(8, 8).eval(), (torch.ones(2, 4),)
"""


def export(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "models.py").write_text(MODULE)
    return run_program("-m", "fastamp", "export", *arguments, cwd=folder)


def test_a_program_is_written(tmp_path: Path):
    done = export(tmp_path, "models:make", "m.pt2", "--dtype", "float16", "--lists", "cuda")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # No warnings of torch's own code either.
    assert "as the policies of its ops want it: 1 fp32, 1 lower\n" in done.stdout
    program = torch.export.load(tmp_path / "m.pt2")
    assert program.module()(torch.ones(2, 8)).dtype == torch.float32
    assert program.state_dict["0.weight"].dtype == torch.float16
    again = export(tmp_path, "models:make", "m.pt2")
    assert again.returncode == 1
    assert "python -m fastamp export: expected a path where nothing is yet" in again.stderr


def test_an_onnx_file_is_float16_by_default_and_replaced_on_request(tmp_path: Path):
    pytest.importorskip("onnxruntime")
    first = export(tmp_path, "models:make", "m.onnx", "--lists", "cuda")
    assert first.returncode == 0
    assert first.stderr == ""
    assert "onnxruntime agrees with the program" in first.stdout
    again = export(tmp_path, "models:make", "m.onnx", "--lists", "cuda")
    assert again.returncode == 1
    assert "overwrite=True (--overwrite) replaces a file" in again.stderr
    options = ["--overwrite", "--tolerance", "0.5"]
    assert export(tmp_path, "models:make", "m.onnx", "--lists", "cuda", *options).returncode == 0


def test_the_format_is_that_of_the_files_name(tmp_path: Path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    done = export(tmp_path, "models:make", "m.onnx", "--dtype", "float16", "--lists", "cuda")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^export: weights and constants: \d+ bytes$", done.stdout, re.MULTILINE)
    assert (tmp_path / "m.onnx").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--help"], 0, "MODULE:CALLABLE"),
        (["models", "m.pt2"], 2, "expected MODULE:CALLABLE, got 'models'"),
        (["models:none", "m.pt2"], 1, "expected models:none to be there, got AttributeError"),
        (["no_module:make", "m.pt2"], 1, "got ModuleNotFoundError"),
        (["models:wrong", "m.pt2"], 1, "to return a model and a tuple of inputs, got 3"),
        (["models:make", "m.pt2", "--format", "tf"], 2, "invalid choice: 'tf'"),
        (
            ["models:make", "m.onnx", "--format", "ep"],
            1,
            "expected a path that ends in .pt2 for format 'ep'",
        ),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], status: int, text: str, tmp_path: Path):
    done = export(tmp_path, *arguments)
    assert done.returncode == status, done.stderr
    assert text in done.stdout + done.stderr
    assert not {"m.pt2", "m.onnx"} & set(os.listdir(tmp_path))  # noqa: PTH208


def test_inputs_that_do_not_fit_are_printed_in_one_line(tmp_path: Path):
    done = export(tmp_path, "models:narrow", "m.pt2")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "python -m fastamp export: expected a model that runs with the example inputs in the region"
    )
    assert "[2, 4] X [8, 8]" in done.stderr
    assert len(done.stderr.splitlines()) == 1  # Fake tensors log their stack.
