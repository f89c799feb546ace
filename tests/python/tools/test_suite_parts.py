# SPDX-License-Identifier: Apache-2.0
"""Which tests make test runs, and which a change adds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import run_tests
import suite_costs
import suite_parts
from tracked_files import tracked_files

ROOT = Path(__file__).resolve().parents[3]
FILES = [str(path.relative_to(ROOT)) for path in tracked_files(ROOT)]


def test_every_file_of_the_repository_says_which_parts_it_touches():
    unknown = [file for file in FILES if suite_parts.of_longest(suite_parts.TOUCHED, file) is None]
    assert unknown == []


def test_every_test_file_has_a_part():
    tests = run_tests.test_files()
    assert len(tests) > 200
    for file in tests:
        part = suite_parts.of_longest(suite_parts.TESTS, file)
        assert part == suite_parts.PRODUCT or part in suite_parts.PARTS, file


@pytest.mark.parametrize("table", [suite_parts.TESTS, suite_parts.TOUCHED])
def test_tables_name_nothing_that_is_gone(table):
    known = {"/".join(file.split("/")[:count]) for file in FILES for count in range(1, 9)}
    assert set(table) <= known


def test_a_changed_test_file_runs_the_part_that_it_is_in():
    for file in run_tests.test_files():
        part = suite_parts.of_longest(suite_parts.TESTS, file)
        if part != suite_parts.PRODUCT:
            assert part in suite_parts.touched([file]), file
        if "mark.long" in (ROOT / file).read_text(encoding="utf-8"):
            assert part != suite_parts.PRODUCT or "long" in suite_parts.touched([file]), file


def test_ranks_are_all_counted():
    """Those of the simulated device are no entries of the table of costs."""
    ranks = re.compile(r"\bsupport(\.| import .*)(simulated_)?ranks\b|\bmp\.spawn\(.*nprocs=[2-9]")
    files = run_tests.files_by_entry(run_tests.test_files())
    found = {
        name
        for name, of_entry in files.items()
        if any(ranks.search((ROOT / file).read_text(encoding="utf-8")) for file in of_entry)
    }
    found -= {"tests/python/simulated_cuda/test_nccl.py"}
    assert found | {"tests/python/debugging/test_compare.py"} == set(suite_parts.RANKS)


@pytest.mark.parametrize(
    ("parts", "minutes"), [(frozenset(), 3), (suite_parts.ALL, 30)], ids=["test", "test-all"]
)
def test_ranks_take_a_small_part_of_the_time_of_the_tests(parts, minutes):
    """By the table of costs, in minutes of one core; docs/distributed.md has the sums."""
    entries = [
        (entry.runner, entry.name)
        for entry in run_tests.pytest_entries(parts)
        if entry.name.removesuffix(", long") in suite_parts.RANKS
    ]
    costs = suite_costs.read()
    assert len(entries) > 10
    assert [name for name in entries if name not in costs] == []
    assert sum(costs[name] for name in entries) < 60 * minutes


def test_the_longest_path_decides_and_an_unknown_file_means_everything():
    table = {"a": 1, "a/b": 2, "a/b/c.py": 3}
    found = [suite_parts.of_longest(table, path) for path in ("a/x", "a/b/x", "a/b/c.py", "ab")]
    assert found == [1, 2, 3, None]
    assert suite_parts.touched(["SECURITY.md"]) == frozenset()
    assert suite_parts.touched(["SECURITY.md", "new/file"]) == suite_parts.ALL
    assert suite_parts.touched(["benchmarks/run.py", "tests/consumer/main.cpp"]) == {
        "workshop",
        "packages",
    }
    assert suite_parts.touched([]) == frozenset()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit, and git in it."""

    def git(*words):
        names = ["-c", "user.name=n", "-c", "user.email=e@e"]
        command = ["git", *names, *words]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    monkeypatch.setattr(suite_parts, "ROOT", tmp_path)
    for name in ("FASTAMP_BASE", "GITHUB_BASE_REF"):
        monkeypatch.delenv(name, raising=False)
    git("init", "-q", "-b", "main")
    (tmp_path / "old.txt").write_text("1")
    git("add", ".")
    git("commit", "-qm", "1")
    return tmp_path, git


def test_where_nothing_says_what_changed_everything_is_run(repository, monkeypatch, capsys):
    _, git = repository
    assert suite_parts.changed() is None  # no other branch
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert suite_parts.changed() is None  # on that branch itself
    options = run_tests.parse(["--build-dir", "b", "--changed"])
    assert run_tests.chosen_parts(options) == suite_parts.ALL
    assert "every part is run" in capsys.readouterr().out
    monkeypatch.setenv("FASTAMP_BASE", "nothing")
    assert suite_parts.changed() is None


def test_changes_are_those_since_the_base_and_those_not_committed(repository, monkeypatch):
    folder, git = repository
    first = git("rev-parse", "HEAD")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    (folder / "benchmarks").mkdir()
    git("mv", "old.txt", "benchmarks/new.txt")
    git("commit", "-qm", "2")
    assert suite_parts.changed() == ["benchmarks/new.txt", "old.txt"]
    (folder / "SECURITY.md").write_text("2")
    assert suite_parts.changed() == ["SECURITY.md", "benchmarks/new.txt", "old.txt"]
    git("add", ".")
    git("commit", "-qm", "3")
    git("update-ref", "refs/remotes/origin/main", "HEAD~1")
    assert suite_parts.changed() == ["SECURITY.md"]
    monkeypatch.setenv("FASTAMP_BASE", first)
    assert suite_parts.changed() == ["SECURITY.md", "benchmarks/new.txt", "old.txt"]


def test_contributing_names_every_part():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for part in suite_parts.PARTS:
        assert re.search(rf"^\| `{part}` \|", text, re.MULTILINE), part
