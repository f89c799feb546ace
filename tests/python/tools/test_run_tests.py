# SPDX-License-Identifier: Apache-2.0
import os
import sys

import pytest

import run_tests


def python(code):
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (run_tests.CTEST_SUMMARY, "100% tests passed, 0 tests failed out of 3"),
        (run_tests.CTEST_SUMMARY, "100% tests passed out of 3"),
        (run_tests.CTEST_SUMMARY, "67% tests passed, 1 test failed out of 3"),
        (run_tests.PYTEST_SUMMARY, "==== 3 passed in 0.12s ===="),
        (run_tests.PYTEST_SUMMARY, "==== 1 failed, 2 passed, 4 skipped in 61.20s (0:01:01) ===="),
        (run_tests.PYTEST_SUMMARY, "==== 1 error in 0.12s ===="),
    ],
)
def test_summary_of_each_runner_is_recognised(pattern, line):
    code = f"import sys; print('x'); print({line!r}); print('y'); sys.exit(3)"
    assert run_tests.run(python(code), pattern) == (3, line)


def test_a_runner_that_dies_is_said_to_have_no_summary():
    status, line = run_tests.run(python("import os; os.abort()"), run_tests.PYTEST_SUMMARY)
    assert status != 0
    assert "ended without a summary" in line


@pytest.mark.parametrize(("ctest", "pytest_", "expected"), [(0, 0, 0), (8, 0, 1), (0, 1, 1)])
def test_either_failure_fails_and_both_summaries_come_last(
    monkeypatch, capsys, ctest, pytest_, expected
):
    results = iter([(ctest, "ctest line"), (pytest_, "pytest line")])
    monkeypatch.setattr(run_tests, "run", lambda *_: next(results))
    monkeypatch.setattr(run_tests, "gpu_name", lambda: "")
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "--build-dir", "build"])
    assert run_tests.main() == expected
    assert capsys.readouterr().out.splitlines()[-2:] == ["ctest line", "pytest line"]


def test_without_a_gpu_the_gpu_run_fails_and_says_so(monkeypatch):
    monkeypatch.setattr(run_tests, "gpu_name", lambda: "")
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "--build-dir", "build", "--cuda"])
    with pytest.raises(SystemExit, match="no CUDA GPU here"):
        run_tests.main()


def test_a_run_without_a_gpu_says_that_tests_are_skipped(monkeypatch, capsys):
    monkeypatch.setattr(run_tests, "run", lambda *_: (0, "line"))
    monkeypatch.setattr(run_tests, "gpu_name", lambda: "")
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "--build-dir", "build"])
    run_tests.main()
    assert "no CUDA GPU here: tests that need one are skipped" in capsys.readouterr().out


def test_the_long_run_of_emulated_kernels_runs_all_their_cases_and_nothing_else(monkeypatch):
    calls = []

    def run(command, _):
        calls.append((command[-2:], os.environ.get("FASTAMP_EMULATE_LONG")))
        return 5, "line"

    monkeypatch.setattr(run_tests, "run", run)
    monkeypatch.setenv("FASTAMP_EMULATE_LONG", "")
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "--build-dir", "build", "--emulated"])
    assert run_tests.main() == 5
    assert calls == [(["-L", "emulated"], "1")]
