# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/story.md print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.children import run_program

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "story.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.slow


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind == language]


def comparable(text: str) -> str:
    """Without what another version of a library or another CPU may print otherwise: last digits."""
    return re.sub(r"modeling_t5.py:\d+", "modeling_t5.py:#", re.sub(r"(\d\.\d)\d+", r"\1", text))


def test_the_commands_of_the_story_print_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the thirdparty extra is not installed")
    (tmp_path / "train.py").write_text(blocks("python")[0], encoding="utf-8")
    (tmp_path / "policy.toml").write_text(blocks("toml")[0], encoding="utf-8")
    shown = blocks("")
    assert len(shown) == 3
    commands = ["python train.py"] + [block.splitlines()[0][2:] for block in shown[1:]]
    outputs = [shown[0], *(block.partition("\n")[2] for block in shown[1:])]
    for command, output in zip(commands, outputs, strict=True):
        done = run_program(*command.split()[1:], cwd=tmp_path)
        assert "Traceback" not in done.stderr, done.stderr
        assert comparable(done.stdout) == comparable(output)
