# SPDX-License-Identifier: Apache-2.0
"""The programs of `make simcuda`, without a device."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import simulated_cuda
import simulated_tests
from simulated_tests import PASSES, Pass, run, run_passes
from support.children import child_environment
from tracked_files import ROOT

SUMMARY = re.compile("^done.*")


def program(text: str, name: str = "a pass") -> Pass:
    return Pass(name, lambda _: [sys.executable, "-c", text], summary=SUMMARY)


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(simulated_tests, "command_of", lambda one, folder: one.command(folder))


@pytest.mark.usefixtures("no_device")
def test_a_pass_tells_its_last_summary_and_shows_what_failed(tmp_path, capsys):
    passed, line = run(program("print('done 1\\ndone 2\\nmore')"), tmp_path)
    assert passed
    assert line == "simulated, a pass: done 2"
    assert "more" not in capsys.readouterr().out
    passed, line = run(program("print('a reason'); raise SystemExit(3)"), tmp_path)
    assert not passed
    assert line == "simulated, a pass: ended without a summary"
    assert "a reason" in capsys.readouterr().out


@pytest.mark.usefixtures("no_device")
def test_all_passes_run_and_failures_are_counted(tmp_path, capsys):
    texts = ("print('done 1')", "raise SystemExit(1)", "print('done 3')")
    passes = [program(text, f"pass {i}") for i, text in enumerate(texts)]
    assert run_passes(passes, tmp_path) == 1
    last = capsys.readouterr().out.splitlines()[-3:]
    assert [line.rpartition(": ")[2] for line in last] == [
        "done 1",
        "ended without a summary",
        "done 3",
    ]


def test_passes_have_names_of_their_own_and_run_what_there_is():
    assert len({one.name for one in PASSES}) == len(PASSES)
    for one in PASSES:
        words = one.command(ROOT / "build")
        paths = [word for word in words if word.startswith("tests/")]
        assert all(list(ROOT.glob(f"{path}*")) for path in paths), one.name


def child(*words: str) -> str:
    environment = child_environment()
    environment["PYTHONPATH"] += f":{ROOT}:{ROOT / 'tools'}"
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_small_rows_keep_their_names(tmp_path):
    code = """
import sys
from pathlib import Path
from benchmarks.rows import all_rows
names = [row.name for row in all_rows(["cuda"])]
for name in [name for name in sys.modules if name.startswith("benchmarks")]:
    del sys.modules[name]
from simulated_rows import make_rows_small
make_rows_small(Path(sys.argv[1]))
from benchmarks.rows import all_rows
assert [row.name for row in all_rows(["cuda"])] == names
from benchmarks import results_file, run
assert results_file.FOLDER == Path(sys.argv[1]) / "benchmarks" / "results"
assert run.Plan(None).base().enough(2, 0.0)
print(len(names))
"""
    assert int(child("-c", code, str(tmp_path))) > 100


def test_a_device_of_an_earlier_build_with_cuda_is_none(tmp_path):
    folder = tmp_path / "simulated_cuda"
    folder.mkdir()
    for name in ("libcudart.so.13", "libcuda.so.1"):
        (folder / name).touch()
    cache = tmp_path / "CMakeCache.txt"
    for wish, built in (("ON", True), ("AUTO", True), ("OFF", False)):
        cache.write_text(f"FASTAMP_CUDA:STRING={wish}\n")
        assert simulated_cuda.is_built(tmp_path) == built


def sanitizer(tool):
    stand_in = (str(ROOT / "tools" / "simulated_gpu.py"), "--as-compute-sanitizer")
    return *stand_in, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"


def test_the_memcheck_stand_in_runs_the_command_with_guards(monkeypatch):
    monkeypatch.delenv("SIMULATED_CUDA_GUARDS", raising=False)
    code = "import os; print(os.environ.get('SIMULATED_CUDA_GUARDS', ''))"
    assert child(*sanitizer("memcheck"), sys.executable, "-c", code).strip() == "1"


def test_the_racecheck_stand_in_runs_a_part_of_what_memcheck_has_run():
    code = "import sys; print(*sys.argv[1:])"
    command = (*sanitizer("racecheck"), sys.executable, "-c", code, "tests/python/ops", "-q")
    words = child(*command).split()
    assert words == ["tests/python/ops/test_devices_and_streams.py", "-q"]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_the_racecheck_stand_in_lists_a_program_s_cases(monkeypatch, count):
    """As Catch2 does: one without any is an error, and the number is version 2's exit status."""
    monkeypatch.delenv("SIMULATED_CUDA_GUARDS", raising=False)
    code = f"""
import os, sys
assert "SIMULATED_CUDA_GUARDS" not in os.environ
print("Matching test cases:", *sys.argv[1:])
print("{count} matching test case" + "s" * ({count} != 1))
raise SystemExit({count})
"""
    command = [sys.executable, *sanitizer("racecheck"), sys.executable, "-c", code, "~[graph]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (count > 0), done.stdout + done.stderr
    assert done.stdout.startswith("Matching test cases: ~[graph] --list-tests")
