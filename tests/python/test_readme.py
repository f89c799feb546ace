# SPDX-License-Identifier: Apache-2.0
"""The README's programs are taken out of it, and run as a reader would run them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastamp

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language):
    """The one fenced block of a language."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1, f"{len(blocks)} blocks of {language}"
    return blocks[0]


def tool(name):
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def run(*command, **options):
    result = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_python_quick_start_trains_in_half_precision(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(block("python"), encoding="utf-8")
    output = run(sys.executable, program)
    loss = re.fullmatch(r"torch\.float16, loss (\d\.\d+), scale 65536\n", output)
    assert loss, output
    assert float(loss[1]) < 2.3  # ln 10 is the loss of an untrained model


@pytest.mark.slow
@pytest.mark.timeout(1200)  # <torch/torch.h> takes long to compile on a busy machine
def test_cpp_quick_start_builds_with_the_cmake_file_beside_it(tmp_path):
    (tmp_path / "main.cpp").write_text(block("cpp"), encoding="utf-8")
    (tmp_path / "CMakeLists.txt").write_text(block("cmake"), encoding="utf-8")
    prefixes = f"{torch.utils.cmake_prefix_path};{fastamp.cpp.cmake_prefix_path}"
    options = [f"-DCMAKE_PREFIX_PATH={prefixes}"]
    if shutil.which("ccache"):
        options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    run(tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build", *options)
    run(tool("cmake"), "--build", tmp_path / "build")
    assert run(tmp_path / "build" / "train") == "scale 65536\n"


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_make_command_names_a_target():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)\b", README):
        if target != "targets":
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_make_alone_says_what_there_is_to_make():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    told = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    # What .ci/run calls is for no one else.
    assert targets - {"help", "test-changed"} <= set(re.findall(r"[a-z][a-z-]*", told))
