# SPDX-License-Identifier: Apache-2.0
"""tools/suite_batches.py: which files of tests share a process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

import run_tests
import suite_batches
import suite_costs
import suite_parts
from suite_queue import Entry

TAIL = ("-p", "no:cacheprovider", "-m", "not long")


def entry(name: str, **options) -> Entry:
    return Entry("pytest", name, (name, *TAIL), **options)


def files(found: Entry) -> list[str]:
    return [word for word in found.command if word.endswith(".py")]


def batches(entries: list[Entry], **seconds: float) -> list[list[str]]:
    costs = {("pytest", f"t/{name}.py"): cost for name, cost in seconds.items()}
    return sorted(map(files, suite_batches.batched(entries, costs)))


def test_every_test_of_every_part_is_in_one_entry_as_before():
    entries = run_tests.pytest_entries(suite_parts.ALL)
    costs = suite_costs.read()
    found = suite_batches.batched(entries, costs)
    assert Counter(f for one in found for f in files(one)) == Counter(
        f for one in entries for f in files(one)
    )
    assert len({one.name for one in found}) == len(found) < len(entries) - 100
    whole = {one.name: one for one in entries}
    for one in found:
        if whole.get(one.name) != one:
            own = [whole[file] for file in files(one)]
            assert len({file.rpartition("/")[0] for file in files(one)}) == 1
            assert {(each.part, each.needs) for each in own} == {("product", one.needs)}
            assert one.command == (*files(one), *own[0].command[1:])
            assert costs["pytest", one.name] <= suite_batches.BATCH_SECONDS


def test_small_files_of_a_folder_are_run_together_until_a_process_has_enough():
    entries = [entry(f"t/{name}.py") for name in "abcdef"] + [entry("u/a.py")]
    seconds = dict(zip("abcde", (7.9, 7.9, 7.0, 8.0, 2.0), strict=True))  # f has never been run
    assert batches(entries, **seconds) == [
        ["t/a.py", "t/b.py"],
        ["t/c.py", "t/e.py"],
        ["t/d.py"],
        ["t/f.py"],
        ["u/a.py"],
    ]


def test_a_batch_is_named_by_its_files_and_costs_one_start():
    costs = {("pytest", f"t/{name}.py"): 4.0 for name in "abc"}
    (found,) = suite_batches.batched([entry(f"t/{name}.py") for name in "abc"], costs)
    assert found == Entry(
        "pytest", "t/a.py and 2 more up to c.py", ("t/a.py", "t/b.py", "t/c.py", *TAIL)
    )
    assert costs["pytest", found.name] == 8.0


def test_what_is_not_small_or_not_of_the_product_or_run_otherwise_is_by_itself():
    long = Entry("pytest", "t/a.py, long", ("t/a.py", "-m", "long"), part="long")
    folder = Entry("pytest", "t", ("t/x.py", "t/y.py", *TAIL))
    program = Entry("ctest", "core", ("core",))
    other = entry("t/c.py", part="workshop")
    alone = [entry("t/b.py", needs="build folder"), other, long, folder, program]
    costs = {(one.runner, one.name): 1.0 for one in [*alone, entry("t/a.py"), entry("t/d.py")]}
    found = suite_batches.batched([*alone, entry("t/a.py"), entry("t/d.py")], costs)
    assert [one for one in found if one in alone] == [other, long, folder, program, alone[0]]
    assert [files(one) for one in found if one not in alone] == [["t/a.py", "t/d.py"]]


def test_a_file_without_tests_is_refused_among_others(request, tmp_path):
    conftest = request.config.pluginmanager.get_plugin(
        str(Path(__file__).parents[1] / "conftest.py")
    )
    paths = [tmp_path / name for name in ("test_a.py", "test_b.py")]
    for path in paths:
        path.touch()
    config = SimpleNamespace(args=[f"{paths[0]}::test", *map(str, paths)], stash=pytest.Stash())
    found = [SimpleNamespace(path=path) for path in paths]
    conftest.refuse_files_without_tests(config, found)
    with pytest.raises(
        pytest.UsageError, match=r"expected tests in each file, got none in .*_b\.py$"
    ):
        conftest.refuse_files_without_tests(config, found[:1])
