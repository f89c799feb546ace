# SPDX-License-Identifier: Apache-2.0
"""The queue of the tests: nothing that is no clear success passes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import suite_costs
import suite_queue
from patience import patience
from support.children import check_python, child_environment

TOOLS = Path(suite_queue.__file__).parent
CATCH2 = "All tests passed (3 assertions in 1 test case)"


@pytest.mark.parametrize(
    ("status", "output", "problem"),
    [
        (0, f"{CATCH2}\n", ""),
        (0, "test cases: 2 | 1 passed | 1 failed as expected\n", ""),
        (0, "", "ended without a summary, or ran no test"),
        (0, "No tests ran\n", "ended without a summary, or ran no test"),
        (1, f"{CATCH2}\n", "exit status 1"),
        (-11, "", "ended by SIGSEGV"),
        (-11, f"{CATCH2}\n", "ended by SIGSEGV"),  # at its exit
    ],
)
def test_verdicts_of_programs(status, output, problem):
    entry = suite_queue.Entry("ctest", "x", ())
    counts, found = suite_queue.judge(entry, status, output)
    assert found == problem
    assert counts == {"failed" if problem else "passed": 1}


def test_a_program_may_say_that_it_was_skipped():
    entry = suite_queue.Entry("ctest", "x", ())
    assert suite_queue.judge(entry, 77, "skipped: no CUDA device") == ({"skipped": 1}, "")


@pytest.mark.parametrize(
    ("status", "line", "problem", "counts"),
    [
        (0, "=== 3 passed, 1 skipped in 0.12s ===", "", {"passed": 3, "skipped": 1}),
        (0, "=== 4 skipped, 2 deselected in 0.1s ===", "", {"skipped": 4, "deselected": 2}),
        (0, "=== 2 passed, 1 xfailed, 3 warnings in 61.20s (0:01:01) ===", "",
         {"passed": 2, "xfailed": 1}),
        (1, "=== 1 failed, 2 passed in 0.1s ===", "exit status 1", {"failed": 1, "passed": 2}),
        (1, "=== 2 errors in 0.1s ===", "exit status 1", {"error": 2}),
        (5, "=== no tests ran in 0.1s ===", "collected no test", {"error": 1}),
        (5, "=== 7 deselected in 0.1s ===", "collected no test", {"deselected": 7, "error": 1}),
        (0, "=== 7 deselected in 0.1s ===", "collected no test", {"deselected": 7, "error": 1}),
        (0, "", "exit status 0, ended without a summary", {"error": 1}),
        (-6, "", "ended by SIGABRT, ended without a summary", {"error": 1}),
        (-11, "=== 3 passed in 0.1s ===", "ended by SIGSEGV", {"passed": 3, "error": 1}),
    ],
)  # fmt: skip
def test_verdicts_of_files(status, line, problem, counts):
    found = suite_queue.judge(suite_queue.Entry("pytest", "x", ()), status, f"x\n{line}\ny\n")
    assert found == (counts, problem)


FILES = {
    "passes": "def test_a(): pass\ndef test_b(): pass",
    "skips": "import pytest\ndef test_a(): pytest.skip('why')",
    "fails": "def test_a(): assert 1 == 2",
    "breaks": "import nothing_of_this_name",
    "empty": "x = 1",
    "aborts": "import os\ndef test_a(): os.abort()",
    "leaves": "import os\ndef test_a(): os._exit(0)",  # green, had nobody asked for a summary
    "crashes_at_exit": "import atexit, os\ndef test_a(): atexit.register(os.abort)",
    "hangs_at_exit": "import atexit, time\ndef test_a(): atexit.register(time.sleep, 1e6)",
    "starts_processes": """
import multiprocessing
def test_a():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1]
""",
    "sees_the_last": "import sys\ndef test_a(): sys.marked = 1",
    "sees_the_next": "import sys\ndef test_a(): assert not hasattr(sys, 'marked')",
}
RUN = """
import json, sys
from pathlib import Path
import suite_queue
folder = Path(sys.argv[1])
options = ("-p", "no:cacheprovider", "-c", str(folder / "pytest.ini"))
entries = [
    suite_queue.Entry("pytest", file.stem, (file.name, *options), folder)
    for file in sorted(folder.glob("test_*.py"))
]
program = [sys.executable, "-c", "import os; print('All tests passed (1 assertion)'); os.abort()"]
entries.append(suite_queue.Entry("ctest", "program", tuple(program)))
results = suite_queue.run(entries, 2, folder / "logs", {"ctest": 60, "pytest": float(sys.argv[2])})
results = list(results)
found = {r.entry.name.removeprefix("test_"): [r.problem, dict(r.counts), r.cpu] for r in results}
(folder / "found.json").write_text(json.dumps([found, suite_queue.summaries(results, 1.0)]))
"""


def run_files(folder, files, limit):
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text, encoding="utf-8")
    program = folder / "run.py"
    program.write_text(RUN, encoding="utf-8")  # with no guard: nobody may import it again
    check_python(str(program), str(folder), str(limit), PYTEST_ADDOPTS="", PYTEST_PLUGINS="")
    return json.loads((folder / "found.json").read_text())


def test_each_way_of_not_passing_is_told(tmp_path):
    found, summaries = run_files(tmp_path, {k: v for k, v in FILES.items() if "hang" not in k}, 600)
    problems = {name: problem for name, (problem, *_) in found.items()}
    assert problems == {
        "passes": "",
        "skips": "",
        "fails": "exit status 1",
        "breaks": "exit status 2",
        "empty": "collected no test",
        "aborts": "ended by SIGABRT, ended without a summary",
        "leaves": "exit status 0, ended without a summary",
        "crashes_at_exit": "ended by SIGABRT",
        "starts_processes": "",
        "sees_the_last": "",
        "sees_the_next": "",
        "program": "ended by SIGABRT",
    }
    assert summaries[0] == "0% tests passed, 1 test failed out of 1"
    assert "1 failed, 6 passed, 1 skipped, 5 errors in 1.00s" in summaries[1]


def test_what_hangs_is_ended_and_fails(tmp_path):
    found, _ = run_files(tmp_path, {"hangs_at_exit": FILES["hangs_at_exit"]}, 5)
    assert found["hangs_at_exit"][0] == "ran into its time limit, 5 s"


def test_what_a_test_leaves_running_is_ended(tmp_path):
    text = """
        import subprocess, sys
        def test_a():
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
            open("pid", "w").write(str(child.pid))
    """
    found, _ = run_files(tmp_path, {"leaves_a_child": textwrap.dedent(text)}, 600)
    assert found["leaves_a_child"][0] == ""
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_the_time_of_a_fork_server_and_its_children_is_counted(tmp_path):
    """Of ranks, for example: the server is nobody's to wait for, and ends after the tests."""
    text = """
        import multiprocessing, time
        def burn():
            while time.process_time() < 2:
                pass
        def test_a():
            child = multiprocessing.get_context("forkserver").Process(target=burn)
            child.start()
            child.join()
            assert child.exitcode == 0
    """
    found, _ = run_files(tmp_path, {"ranks": textwrap.dedent(text)}, 600)
    problem, _, cpu = found["ranks"]
    assert problem == ""
    assert cpu >= 2


def test_what_needs_the_same_runs_one_after_the_other(tmp_path):
    """Each says when it begins and ends; the two that build never overlap."""
    log = tmp_path / "log"
    code = (
        "import sys; name, log = sys.argv[1:]\n"
        "say = lambda word: open(log, 'a').write(word + name)\n"
        "say('<'); sum(range(10**6)); say('>'); print('All tests passed (1 assertion)')"
    )
    entries = [
        suite_queue.Entry("ctest", name, (sys.executable, "-c", code, name, str(log)), needs=needs)
        for name, needs in (("a", "build"), ("b", "build"), ("c", "build"), ("d", ""))
    ]
    results = list(suite_queue.run(entries, 3, tmp_path / "logs", {"ctest": patience(600)}))
    assert sorted(result.entry.name for result in results) == ["a", "b", "c", "d"]
    said = re.sub("[<>]d", "", log.read_text())
    assert said == "<a>a<b>b<c>c"


def test_totals_are_in_the_words_of_both_runners():
    def result(runner, problem="", **counts):
        entry = suite_queue.Entry(runner, "x", ())
        counter = suite_queue.Counter(counts)
        return suite_queue.Result(entry, counter, problem, 1.0, 1.0, "", Path("log"))

    good = [result("ctest", passed=1), result("pytest", passed=3, skipped=1)]
    ctest, pytest_ = suite_queue.summaries([*good, result("pytest", passed=2)], 12.5)
    assert ctest == "100% tests passed, 0 tests failed out of 1"
    assert pytest_.strip("=") == " 5 passed, 1 skipped in 12.50s "
    bad = [result("ctest", "exit status 1", failed=1), result("pytest", "x", error=2)]
    ctest, pytest_ = suite_queue.summaries([*good, *bad], 1.0)
    assert ctest == "50% tests passed, 1 test failed out of 2"
    assert pytest_.strip("=") == " 3 passed, 1 skipped, 2 errors in 1.00s "
    assert suite_queue.summaries([], 1.0)[0] == "No tests were found!!!"


def test_costs_are_kept_and_give_the_order(tmp_path):
    file = tmp_path / "costs.tsv"
    costs = {("pytest", "b"): 2.0, ("pytest", "a"): 30.5, ("ctest", "c"): 4.0}
    suite_costs.write(costs, file)
    assert suite_costs.read(file) == costs
    names = [("pytest", "b"), ("ctest", "c"), ("pytest", "new"), ("pytest", "a")]
    ordered = suite_costs.longest_first(names, costs)
    assert [name for _, name in ordered] == ["new", "a", "c", "b"]
    log = "# ninja log v6\n0\t1500\t1\ttests/cpp/CMakeFiles/t.dir/ops/test_x.cpp.o\thash\n"
    (tmp_path / ".ninja_log").write_text(log, encoding="utf-8")
    assert suite_costs.compilations(tmp_path) == {("compile", "t ops/test_x.cpp"): 1.5}


def test_the_committed_costs_can_be_read():
    costs = suite_costs.read()
    assert {what for what, _ in costs} == {"compile", "ctest", "pytest"}
    assert all(seconds >= 0 for seconds in costs.values())


def test_the_queue_starts_where_there_is_no_terminal():
    code = f"import sys; sys.path.insert(0, {str(TOOLS)!r}); import suite_queue"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        env={**child_environment(), **os.environ},
        check=False,
    )
    assert done.returncode == 0
