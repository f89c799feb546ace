# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import stat
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import run_tests
import suite_parts
from suite_queue import Entry, Result


def labels(*names):
    return [{"name": "LABELS", "value": list(names)}]


LISTED = {
    "tests": [
        {"name": "core", "command": ["/core"], "properties": labels("cpu")},
        {
            "name": "emulated_asan_norm",
            "command": ["/asan", "[norm]"],
            "properties": [
                {"name": "ENVIRONMENT", "value": ["ASAN_OPTIONS=detect_leaks=0", "A=1"]},
                *labels("cpu", "emulated"),
                {"name": "WORKING_DIRECTORY", "value": "/folder"},
            ],
        },
        {"name": "emulated_tsan_norm", "properties": labels("cpu", "emulated", "flavours")},
        {"name": "cuda", "command": ["/cuda"], "properties": labels("cuda")},
    ]
}


@pytest.fixture
def ctest(monkeypatch, tmp_path):
    """A ctest that lists what it is given."""

    def lists(document):
        program = tmp_path / "ctest"
        (tmp_path / "listed.json").write_text(json.dumps(document))
        program.write_text(f"#!/bin/sh\ncat {tmp_path}/listed.json\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(run_tests, "find_ctest", lambda: str(program))

    lists(LISTED)
    return lists


ROOT = run_tests.ROOT
SESSION = 'scope="' + 'session"'


def names(entries):
    return [entry.name for entry in entries]


@pytest.mark.usefixtures("ctest")
def test_one_emulated_flavour_is_the_products_and_all_are_everythings():
    product = run_tests.ctest_entries(Path("b"), frozenset())
    assert names(product) == ["core", "emulated_asan_norm", "cuda"]
    assert product[1].command == ("/asan", "[norm]")
    assert product[1].folder == Path("/folder")
    assert product[1].environment == (("ASAN_OPTIONS", "detect_leaks=0"), ("A", "1"))
    everything = run_tests.ctest_entries(Path("b"), suite_parts.ALL)
    assert names(everything) == ["core", "emulated_asan_norm", "emulated_tsan_norm", "cuda"]
    assert everything[2].command == ("b/not-built",)  # fails, and says so
    assert names(run_tests.ctest_entries(Path("b"), suite_parts.ALL, "cuda")) == ["cuda"]


def test_a_folder_without_tests_is_refused(ctest):
    ctest({"tests": []})
    with pytest.raises(SystemExit, match="holds no build with tests"):
        run_tests.ctest_entries(Path("b"), frozenset())


def test_long_tests_and_other_parts_are_left_out_of_the_products():
    product = run_tests.pytest_entries(frozenset())
    assert all(entry.command[-2:] == ("-m", "not long") for entry in product)
    assert "tests/python/tools/test_run_tests.py" not in names(product)
    everything = run_tests.pytest_entries(suite_parts.ALL)
    files = [name for name in names(everything) if not name.endswith(", long")]
    assert files == list(run_tests.files_by_entry(run_tests.test_files()))
    workshop = set(names(run_tests.pytest_entries(frozenset({"workshop"})))) - set(names(product))
    assert "tests/python/tools/test_run_tests.py" in workshop
    assert all(suite_parts.of_longest(suite_parts.TESTS, name) == "workshop" for name in workshop)


def test_long_tests_of_a_file_are_an_entry_of_their_own():
    entries = run_tests.pytest_entries(frozenset({"long"}))
    long = {entry.name: entry for entry in entries if entry.command[-2:] == ("-m", "long")}
    assert all(entry.part == "long" for entry in long.values())
    file = "tests/python/float8/test_float8_language_model.py"
    assert long[f"{file}, long"].command[0] == file
    assert file in names(entries)
    assert "tests/python/test_imports.py, long" not in names(entries)


def program(name, part):
    code = "print('All tests passed (1 assertion)')"
    return Entry("ctest", name, (sys.executable, "-c", code), part=part)


@pytest.mark.parametrize(
    ("minutes", "order"),
    [
        (None, ["d", "c", "b", "a"]),
        (5, ["d", "b", "c", "a"]),
        (98 / 60, ["d", "b", "a"]),  # c takes 99 seconds
        (0, ["d", "b"]),
    ],
)
def test_in_limited_time_the_product_comes_first_and_is_all_run(
    monkeypatch, tmp_path, minutes, order
):
    entries = [
        program(name, part)
        for name, part in (("a", "long"), ("b", "product"), ("c", "flavours"), ("d", "product"))
    ]
    costs = {("ctest", name): float(ord(name)) for name in "abcd"}
    monkeypatch.setattr(run_tests.suite_costs, "read", lambda: costs)
    monkeypatch.setattr(run_tests, "patience", lambda seconds: seconds)
    results = run_tests.run_queue(entries, 1, tmp_path, minutes)
    assert names(result.entry for result in results) == order
    assert not any(result.problem for result in results)


def test_the_report_names_what_was_left_out(capsys):
    late = [Entry("ctest", name, ()) for name in ("one", "two")]
    assert run_tests.report([result("b.py", "", passed=2)], 2.0, late) == 0
    assert "left out, for want of time: one, two\n" in capsys.readouterr().out


def test_every_file_is_in_one_entry_and_those_of_one_session_are_together():
    grouped = run_tests.files_by_entry(run_tests.test_files())
    assert sorted(file for files in grouped.values() for file in files) == run_tests.test_files()
    together = {name for name, files in grouped.items() if files != [name]}
    assert together == {"tests/python/distributed"}
    sessions = [
        path.parent for path in (ROOT / "tests").rglob("*.py") if SESSION in path.read_text()
    ]
    assert {str(folder.relative_to(ROOT)) for folder in sessions} == together


def result(name, problem, output="", **counts):
    counter = Counter(counts)
    return Result(Entry("pytest", name, ()), counter, problem, 1.0, 1.0, output, run_tests.LOGS)


def test_the_report_names_failures_and_ends_with_both_summaries(capsys):
    output = "x\nFAILED a.py::test_b - assert 1 == 2\ny\n"
    results = [result("a.py", "exit status 1", output, failed=1), result("b.py", "", passed=2)]
    assert run_tests.report(results, 2.0) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FAILED a.py: exit status 1; all it printed: build/tests"
    assert lines[1] == "  FAILED a.py::test_b - assert 1 == 2"
    assert lines[-2] == "No tests were found!!!"
    assert " 1 failed, 2 passed in 2.00s " in lines[-1]
    assert run_tests.report(results[1:], 2.0) == 0
    assert run_tests.report([], 2.0) == 1


def test_the_report_names_logs_in_a_folder_that_was_given_as_relative(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    failed = replace(result("a.py", "exit status 1", failed=1), log=Path("build/logs/a.log"))
    assert run_tests.report([failed], 2.0) == 1
    assert "all it printed: build/logs/a.log\n" in capsys.readouterr().out


def test_without_a_gpu_the_gpu_run_fails_and_says_so(monkeypatch):
    monkeypatch.setattr(run_tests, "gpu_name", lambda: "")
    with pytest.raises(SystemExit, match="no CUDA GPU here"):
        run_tests.main(["--build-dir", "build", "--cuda"])


@pytest.mark.usefixtures("ctest")
@pytest.mark.parametrize(("gpu", "processes"), [("", 2), ("A GPU", 1)])
def test_a_run_says_whether_there_is_a_gpu_and_gives_it_all(monkeypatch, capsys, gpu, processes):
    ran = []

    def run_queue(entries, count, logs, minutes, costs):  # noqa: ARG001
        ran.append(count)
        return [Result(entry, Counter(passed=1), "", 1.0, 1.0, "", logs) for entry in entries]

    monkeypatch.setattr(run_tests, "gpu_name", lambda: gpu)
    monkeypatch.setattr(run_tests, "run_queue", run_queue)
    monkeypatch.setattr(run_tests.suite_queue, "preload", lambda: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert run_tests.main(["--build-dir", "build", "--only", "test_run_tests"]) == 1
    assert run_tests.main(["--build-dir", "build", "--only", "tools/test_run", "--all"]) == 0
    assert ran == [processes, processes]
    said = "tests that need one are skipped" if not gpu else "GPU: A GPU"
    assert said in capsys.readouterr().out


def test_the_long_run_of_emulated_kernels_runs_all_their_cases_and_nothing_else(monkeypatch):
    calls = []

    def call(command, **_):
        calls.append((command[-2:], os.environ.get("FASTAMP_EMULATE_LONG")))
        return 5

    monkeypatch.setattr(run_tests.subprocess, "call", call)
    monkeypatch.setenv("FASTAMP_EMULATE_LONG", "")
    assert run_tests.main(["--build-dir", "build", "--emulated"]) == 5
    assert calls == [(["-L", "emulated"], "1")]
