# SPDX-License-Identifier: Apache-2.0
"""The program of docs/debugging.md, and what its commands print."""

from __future__ import annotations

import re
from pathlib import Path

from fastamp._debug.check import RULES
from support.children import run_program

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "debugging.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind == language]


def run(tmp_path: Path, *arguments: str) -> str:
    (tmp_path / "train.py").write_text(blocks("python")[0], encoding="utf-8")
    done = run_program("-m", "fastamp", *arguments, "train.py", cwd=tmp_path)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_check_prints_what_the_guide_shows(tmp_path: Path):
    (shown,) = (block for block in blocks("") if block.startswith("fastamp check:"))
    assert run(tmp_path, "check") == shown


def test_inspect_prints_what_the_guide_shows(tmp_path: Path):
    (shown,) = (block for block in blocks("") if "op calls;" in block)
    run(tmp_path, "--inspect", "step.txt", "--at-step", "2")
    title, _, rest = (tmp_path / "step.txt").read_text().partition("\n\n")
    assert re.fullmatch(r"Step 2 of train.py, float16, \d{4}-\d\d-\d\d \d\d:\d\d UTC", title)
    assert rest.startswith(shown)


def test_the_guide_names_each_rule():
    assert set(re.findall(r"^\| `([a-z0-9-]+)` \|", TEXT, re.MULTILINE)) == set(RULES)


def test_bisect_finds_what_the_guide_shows(tmp_path: Path):
    (shown,) = (block for block in blocks("") if block.startswith("Gradients agree"))
    (policies,) = blocks("toml")
    (tmp_path / "bisect_me.py").write_text(blocks("python")[1], encoding="utf-8")
    (tmp_path / "train.py").write_text(blocks("python")[0], encoding="utf-8")
    options = ("bisect_me:bisected", "--policy", "p.toml")
    done = run_program("-m", "fastamp", "bisect", *options, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    # Agreements depend on the order in which the CPU adds; the ops, modules, runs and costs do not.
    printed, written = (re.sub(r"-?[01]\.\d{5}", "#", text) for text in (done.stdout, shown))
    assert printed == written
    assert (tmp_path / "p.toml").read_text().partition("[modules]")[2] == policies.partition(
        "[modules]"
    )[2]
