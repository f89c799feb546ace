# SPDX-License-Identifier: Apache-2.0
"""Files, folders and functions that CONTRIBUTING and the map of the tests name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMED_FILE = re.compile(r"`((?:src|python|include|tests|tools)/[\w./-]+\.\w+)`")
# Where names without a folder lie that the map has in its last column.
HOMES = ("", "python/fastamp", "tests/python", "tests")


def questions() -> dict[str, str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Where is it decided?")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", table, re.MULTILINE)[1:])


QUESTIONS = questions()


@pytest.mark.parametrize("question", [q for q in QUESTIONS if not set(q) <= set("-")])
def test_what_answers_a_question_is_in_the_files_that_are_named(question: str):
    answer = QUESTIONS[question]
    names = re.findall(r"`([\w:]+)\(\)`", answer)
    folder = Path(NAMED_FILE.findall(answer)[0]).parent
    shorter = [str(folder / name) for name in re.findall(r"`(\w+\.(?:h|cpp))`", answer)]
    files = [ROOT / name for name in (*NAMED_FILE.findall(answer), *shorter)]
    assert files
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for name in names:
        assert re.search(rf"\b{name.rpartition(':')[2]}\(", text), name


def test_there_are_ten_questions():
    assert len(QUESTIONS) >= 10


def test_the_map_of_the_tests_names_what_is_there():
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|([^\n]*)\|$", text, re.MULTILINE)
    assert len(rows) > 25
    for first, others in rows:
        _, _, sources = others.partition("|")
        named = re.findall(r"`([\w./-]+)`", first) + re.findall(r"`([\w./-]*[\w/])`", sources)
        for name in named:
            homes = [ROOT / home / name for home in (*HOMES, "tests/cpp")]
            assert any(path.exists() for path in homes), name


@pytest.mark.parametrize("language", ["cpp", "python"])
def test_every_folder_of_tests_is_on_the_map(language: str):
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    for folder in (ROOT / "tests" / language).iterdir():
        if folder.is_dir() and not folder.name.startswith(("__", ".")):
            assert f"`{folder.name}`" in text, folder.name
