# SPDX-License-Identifier: Apache-2.0
"""tools/release_check.py: what it finds wrong, and what it says of steps that fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import release_check  # noqa: E402
from release_check import Step  # noqa: E402

GOOD = {
    "VERSION": "1.2.3\n",
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3 (2030-01-31)\n\n## 1.2.2 (2029-01-31)\n",
    "README.md": "# x\n",
    "docs/cpp.md": "FetchContent_Declare(x GIT_TAG v1.2.3)\n",
}


def write(root: Path, **changed: str) -> Path:
    for name, text in {**GOOD, **changed}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_a_tree_with_one_version_is_right(tmp_path: Path):
    assert list(release_check.wrong_versions(write(tmp_path))) == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("VERSION", "1.2\n", "VERSION: expected three numbers, got '1.2'"),
        ("CHANGELOG.md", "# Changelog\n", "got 'nothing'"),
        ("CHANGELOG.md", "## 1.2.3 (unreleased)\n", "got '1.2.3 (unreleased)'"),
        ("CHANGELOG.md", "## 1.2.2 (2030-01-31)\n", "expected 1.2.3 and a date"),
        ("docs/cpp.md", "GIT_TAG v1.2.2)\n", "cpp.md: expected GIT_TAG v1.2.3, got v1.2.2"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, text: str, found: str):
    wrong = list(release_check.wrong_versions(write(tmp_path, **{name: text})))
    assert any(found in line for line in wrong)


def test_files_that_are_not_committed_are_named(tmp_path: Path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert list(release_check.uncommitted(tmp_path)) == []
    (tmp_path / "new.py").write_text("")
    assert list(release_check.uncommitted(tmp_path)) == ["?? new.py"]


def test_a_step_that_fails_keeps_no_other_from_running(tmp_path: Path, monkeypatch, capsys):
    steps = (
        Step("one", "says why", ["sh", "-c", "echo reason; exit 3"]),
        Step("two", "a function", lambda _: iter(["this is wrong"])),
        Step("three", "is well", ["true"]),
    )
    monkeypatch.setattr(release_check, "STEPS", steps)
    monkeypatch.setattr(release_check, "ROOT", tmp_path)
    monkeypatch.setattr(release_check, "LOGS", tmp_path / "logs")
    assert release_check.main([]) == 1
    said = capsys.readouterr().out
    assert re.search(r"\[1/3\] one +says why \.\.\. FAILED, 0 s\n    reason\n", said)
    assert "this is wrong" in said
    assert "(all of it: logs/two.log)" in said
    assert said.endswith("1 of 3 passed; failed: one, two\n")
    assert release_check.main(["--only", "three"]) == 0
    assert capsys.readouterr().out.endswith("1 of 1 passed: ready for release\n")


def test_every_make_target_of_a_step_exists(capsys):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for step in release_check.STEPS:
        if not callable(step.work) and step.work[0] == "make":
            assert re.search(rf"^{step.work[1]}:", makefile, re.MULTILINE), step.name
    presets = (ROOT / "CMakePresets.json").read_text(encoding="utf-8")
    assert '"asan"' in presets
    assert '"tsan"' in presets
    assert release_check.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(release_check.STEPS)
