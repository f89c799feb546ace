# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that reach each mutant of tools/mutate_at_random.py, which starts this.

The Python tests are collected once, with the package of all mutants; each mutant then costs a
forked process that turns it on and runs those that reach it. C++ tests are run by files. Which test
reaches which mutants, and what it takes, is recorded before, without any of them; a test that fails
then is left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import mutant_results
import suite_costs
from host_mutants import GRAPHED, OWN, HostGroup
from mutant_control import Control
from mutate_host import verdict
from patience import patience
from simulated_cuda import is_built
from tracked_files import ROOT

#: Python tests, by the beginnings of the files whose mutants they are for.
PYTHON_TESTS = {
    "src/autocast": ("tests/python/autocast",),
    "": (
        "tests/python/distributed",
        "tests/python/dropin/test_apex.py",
        "tests/python/dropin/test_clip.py",
        "tests/python/dropin/test_installed_scalers.py",
        "tests/python/dropin/test_state_looks.py",
        "tests/python/graphed",
        "tests/python/nets/test_files.py",
        "tests/python/nets/test_rank_histories.py",
        "tests/python/nets/test_relations.py",
        "tests/python/optim/test_amp_step.py",
        "tests/python/optim/test_fuse.py",
        "tests/python/optim/test_widened_grads.py",
        "tests/python/scaler",
        "tests/python/trace/test_trace_scalers.py",
    ),
}
#: For what only a CUDA device reaches, on the simulated one.
ON_DEVICE = (OWN, GRAPHED, "tests/python/scaler")
#: Folders with a fixture of the session that does the work of all their files.
TOGETHER = ("tests/python/distributed",)
QUICK = 3  # seconds of the tests that are about little else than a mutant, which are run first
SLOW = 8  # seconds after which a Python file is left out, by tests/costs.tsv
PROGRAMS = {
    "fastamp_test_scaler",
    "fastamp_test_autocast",
    "fastamp_test_autocast_regions",
    "fastamp_test_autocast_first_use",
    "fastamp_test_autocast_jit",
}
NOTICED, UNNOTICED = 1, 0
NOTICED_AS = ("killed", "hangs")


@dataclass(frozen=True)
class Test:
    """Facts that a run without mutants shows of a Python test, or of the cases of a C++ file.

    Attributes:
        name: Its node id; or the program and the file's stem.
        state: What this holds for.
        passes: Whether it can notice anything.
        cost: Seconds of CPU.
        reached: Numbers of the mutants whose switch it asks.
    """

    name: str
    state: str
    passes: bool
    cost: float
    reached: tuple[int, ...]


def together(name: str) -> str:
    """Names what shares the fixtures of a module or a session with a test: a file or folder."""
    file = name.partition("::")[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def nearest(tests: Iterable[Test], seconds: float) -> list[Test]:
    """Tests that reach the fewest mutants, and so are about little else; of as many seconds."""
    return _within(sorted(tests, key=lambda test: (len(test.reached), test.cost)), seconds)


def by_files(tests: Iterable[Test], seconds: float) -> list[Test]:
    """Tests of one file one after the other, the quickest file first, of as many seconds."""
    files = [list(group) for _, group in groupby(sorted(tests, key=_by_file), _by_file)]
    return _within((test for file in sorted(files, key=_cost) for test in file), seconds)


def _within(tests: Iterable[Test], seconds: float) -> list[Test]:
    """Returns those of the first seconds; at least one."""
    result: list[Test] = []
    total = 0.0
    for test in tests:
        total += test.cost
        if not result or total <= seconds:
            result.append(test)
    return result


def tests_for(files: Iterable[str]) -> list[str]:
    """The Python tests for the mutants of files."""
    there = tuple(files)
    return [
        test
        for beginning, tests in PYTHON_TESTS.items()
        if any(file.startswith(beginning) for file in there)
        for test in tests
    ]


def _by_file(test: Test) -> str:
    return together(test.name)


def _cost(tests: Sequence[Test]) -> float:
    return sum(test.cost for test in tests)


def cpu_seconds() -> float:
    """Returns the time of this process and of those that it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def limit(cost: float) -> float:
    """Seconds after which something hangs that has taken some CPU before."""
    return patience(30 + 10 * cost)


def in_child(work: Callable[[], int], seconds: float) -> int | None:
    """Runs a function in a forked process; returns its exit status, None if it hangs."""
    process = os.fork()
    if process == 0:
        os.setpgid(0, 0)
        status = NOTICED
        try:
            status = work()
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    ended: int | None = None
    while ended is None and time.monotonic() < end:
        done, code = os.waitpid(process, os.WNOHANG)
        if done:
            ended = code
        else:
            time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # with it, the processes that it has left behind
    if ended is None:
        os.waitpid(process, 0)
    return ended


class CppTests:
    """The files of the C++ tests in a build folder."""

    def __init__(self, build_dir: Path, control: Control, any_cpp: bool) -> None:
        """Reads which programs there are; none is needed without mutants of C++."""
        self.control = control
        commands = json.loads((build_dir / "compile_commands.json").read_text(encoding="utf-8"))
        self.files: dict[str, Path] = {}
        for command in commands if any_cpp else ():
            match = re.search(
                r"(\S+)CMakeFiles/(\w+)\.dir/(?:\S*/)?(test_\w+)\.cpp\.o", command["output"]
            )
            if match is not None and match[2] in PROGRAMS:
                program = Path(command["directory"]) / match[1] / match[2]
                self.files[f"{match[2]} {match[3]}"] = program

    def state(self, name: str) -> str:
        """Returns what a recorded test holds for."""
        status = self.files[name].stat()
        return f"{status.st_mtime_ns} {status.st_size}"

    def record(self, name: str) -> Test:
        """Runs a file's cases without a mutant."""
        self.control.take_reached()
        before = cpu_seconds()
        passes = self.run(self.files[name], [name], patience(600)) == 0
        reached = tuple(sorted(self.control.take_reached()))
        return Test(name, self.state(name), passes, cpu_seconds() - before, reached)

    def run(self, program: Path, names: Sequence[str], seconds: float) -> int | None:
        """Runs cases of a program up to the first that fails; returns its status, None: hangs."""
        tags = ",".join(f"[#{name.split()[1]}]" for name in names)
        try:
            done = subprocess.run(
                [str(program), "-#", "-a", tags], capture_output=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return None
        return done.returncode

    def attempt(self, tests: Sequence[Test]) -> tuple[str, str]:
        """The verdict of C++ tests on the mutant that is on, and which program it is from."""
        by_program: dict[Path, list[Test]] = {}
        for test in tests:
            by_program.setdefault(self.files[test.name], []).append(test)
        for program, found in sorted(by_program.items(), key=lambda item: _cost(item[1])):
            status = self.run(program, [test.name for test in found], limit(_cost(found)))
            if status != 0:
                return "hangs" if status is None else "killed", program.name
        return "survives", ""


class PythonTests:
    """A pytest plugin that runs what it is told to instead of what was collected."""

    def __init__(self, folder: Path, control: Control, work: Callable[[PythonTests], None]) -> None:
        """Calls ``work`` when the tests have been collected."""
        self.folder, self.control, self.work = folder, control, work
        self.items: dict[str, pytest.Item] = {}
        self.failed = False
        self.in_setup: set[int] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Works through the mutants in place of the tests; called by pytest."""
        self.items = {item.nodeid: item for item in session.items}
        self.work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a failure, and what a setup has reached; called by pytest."""
        self.failed = self.failed or report.failed
        if report.when == "setup":
            self.in_setup = self.control.take_reached()

    def state(self, name: str) -> str:
        """Returns what a recorded test holds for."""
        return hashlib.sha256((ROOT / name.partition("::")[0]).read_bytes()).hexdigest()[:16]

    def _run(self, names: Sequence[str]) -> Iterable[str]:
        """Runs tests; yields the name of each when it has been run."""
        items = [self.items[name] for name in names]
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.failed = False
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            yield item.nodeid

    def record(self, names: Sequence[str], note: Callable[[Test], None]) -> None:
        """Runs tests without a mutant, in one forked process, which notes each."""

        def work() -> int:
            others: set[int] = set()
            before = cpu_seconds()
            for name in self._run(names):
                now = cpu_seconds()
                test = Test(name, self.state(name), not self.failed, now - before, ())
                others |= self.in_setup
                reached = tuple(sorted(self.control.take_reached() | others))
                note(Test(name, test.state, test.passes, test.cost, reached))
                before = cpu_seconds()
            return UNNOTICED

        self.control.take_reached()
        in_child(work, patience(3600))

    def attempt(self, tests: Sequence[Test]) -> tuple[str, str]:
        """The verdict of Python tests on the mutant that is on, and the test it is from."""
        seen = self.folder / "noticed.txt"
        seen.unlink(missing_ok=True)

        def work() -> int:
            for name in self._run([test.name for test in tests]):
                if self.failed:
                    seen.write_text(name, encoding="utf-8")
                    os._exit(NOTICED)
            return UNNOTICED

        status = in_child(work, limit(_cost(tests)))
        by = seen.read_text(encoding="utf-8") if seen.is_file() else ""
        return "survives" if status == UNNOTICED else "hangs" if status is None else "killed", by

    def attempt_anew(self, tests: Sequence[Test]) -> tuple[str, str]:
        """Tries it in another process, for what runs while the package is imported."""
        names = [test.name for test in tests]
        command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", *names]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=limit(_cost(tests)), check=False
            )
        except subprocess.TimeoutExpired:
            return "hangs", ""
        return ("killed" if done.returncode != 0 else "survives"), "when it is imported"


class Run:
    """All mutants of a folder against all tests."""

    def __init__(self, folder: Path, seconds: float, output: Any) -> None:
        """Reads what tools/mutate_at_random.py has prepared."""
        self.folder, self.seconds, self.output = folder, seconds, output
        self.plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        self.mutants = sorted(self.plan["mutants"], key=lambda mutant: mutant["number"])
        self.control = Control(folder / "control", (folder / "control").stat().st_size - 5)
        self.control.choose(0)
        any_cpp = any(mutant["file"].endswith(".cpp") for mutant in self.mutants)
        self.cpp = CppTests(Path(self.plan["build_dir"]), self.control, any_cpp)
        self.results = mutant_results.read()
        self.recorded: dict[str, Test] = {}
        self._read_recorded()
        self.simulated: str | None = None  # what those of a CUDA device see without a mutant

    def report(self, line: str) -> None:
        """Prints a line of progress."""
        print(line, file=self.output, flush=True)

    def try_in_cpp(self) -> None:
        """Tries the mutants of C++ on the C++ tests, which need no Python."""
        for name in self.cpp.files:
            if not self._is_known(name, self.cpp.state(name)):
                self._note(self.cpp.record(name))
        for mutant in self.mutants:
            tests = self._tests_of(mutant, self.cpp.files)
            state = _state_of(tests)
            result = self.results.get(mutant["key"], {})
            if not tests or result.get("is") in NOTICED_AS or result.get("C++ tests") == state:
                continue
            with self._chosen(mutant):
                verdict, by = self.cpp.attempt(tests)
            found = {"is": verdict if verdict in NOTICED_AS else "open", "by": by}
            self._report_on(mutant, {**found, "C++ tests": state})

    def __call__(self, python: PythonTests) -> None:
        """Tries the others; ``python`` has collected its tests."""
        at_import = self.control.take_reached()
        self._record(python)
        for mutant in self.mutants:
            tests = self._tests_of(mutant, python.items)
            imported = mutant["number"] in at_import
            if imported and not tests:
                there = {m["number"] for m in self.mutants if m["file"] == mutant["file"]}
                tests = [t for t in self._useful(python.items) if not there.isdisjoint(t.reached)]
            state = _state_of(tests, self.seconds)
            result = self.results.get(mutant["key"], {})
            if result.get("is") in NOTICED_AS or result.get("Python tests") == state:
                continue
            with self._chosen(mutant):
                verdict, by = self._try_in_python(mutant, tests, imported, python)
            if verdict == "not reached" and "C++ tests" in result:
                verdict = "survives"
            found = {**result, "is": verdict, "by": by, "Python tests": state}
            self._report_on(mutant, found)

    @contextmanager
    def _chosen(self, mutant: dict[str, Any]) -> Iterator[None]:
        self.control.choose(mutant["number"])
        try:
            yield
        finally:
            self.control.choose(0)

    def _report_on(self, mutant: dict[str, Any], result: dict[str, str]) -> None:
        """Stores and prints what has been found out of a mutant."""
        result["name"] = mutant["name"]
        self.results[mutant["key"]] = result
        mutant_results.note(mutant["key"], result)
        self.report(f"{mutant['number']:4} {result['is']:11} {mutant['name']}  [{result['by']}]")

    def _note(self, test: Test) -> None:
        """Stores what a run without a mutant shows of a test."""
        self.recorded[test.name] = test
        with (self.folder / "recorded.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(test)) + "\n")

    def _read_recorded(self) -> None:
        """Reads what is known of tests, of this draw."""
        stored = self.folder / "recorded.jsonl"
        lines = stored.read_text(encoding="utf-8").splitlines() if stored.is_file() else []
        if not lines or lines[0] != self.plan["state"]:
            stored.write_text(f"{self.plan['state']}\n", encoding="utf-8")
        else:
            self.recorded = {test.name: test for test in map(_test_from, lines[1:])}

    def _is_known(self, name: str, state: str) -> bool:
        return name in self.recorded and self.recorded[name].state == state

    def _record(self, python: PythonTests) -> None:
        """Runs the Python tests that are not known, or have changed since."""
        # All of a file: fixtures of a module reach for the tests that come after the first.
        states = {name: python.state(name) for name in python.items}
        files = {
            name.partition("::")[0] for name in states if not self._is_known(name, states[name])
        }
        names = [name for name in states if name.partition("::")[0] in files]
        if names:
            self.report(f"{len(names)} tests are run without a mutant")
            for _, those in groupby(sorted(names, key=together), together):
                python.record(list(those), self._note)  # One that ends the process ends no others.
            self._read_recorded()  # The processes that ran them have noted them.
        for name in states:
            if name not in self.recorded:
                self.report(f"left out, ended the run without a mutant: {name}")
            elif not self.recorded[name].passes:
                self.report(f"left out, fails without a mutant: {name}")

    def _useful(self, names: Container[str]) -> list[Test]:
        return [test for name, test in self.recorded.items() if test.passes and name in names]

    def _tests_of(self, mutant: dict[str, Any], names: Container[str]) -> list[Test]:
        """Returns those of some tests that reach a mutant."""
        return [test for test in self._useful(names) if mutant["number"] in test.reached]

    def _try_in_python(
        self, mutant: dict[str, Any], tests: Sequence[Test], imported: bool, python: PythonTests
    ) -> tuple[str, str]:
        if not tests:
            return self._on_simulated_device(mutant)
        direct = [test for test in tests if mutant["number"] in test.reached]
        quick = nearest(direct, QUICK)
        others = [test for test in by_files(direct, self.seconds) if test not in quick]
        again = nearest(tests, QUICK) if imported else []
        for attempt, of in (
            (python.attempt, quick),
            (python.attempt, others),
            (python.attempt_anew, again),
        ):
            verdict, by = attempt(of) if of else ("survives", "")
            if verdict != "survives":
                break
        return verdict, by

    def _on_simulated_device(self, mutant: dict[str, Any]) -> tuple[str, str]:
        """The verdict of the tests of a CUDA device on the mutant that is on."""
        build_dir = Path(self.plan["build_dir"])
        if not is_built(build_dir):
            return "not reached", ""

        def seen() -> str:
            group = HostGroup(mutant["file"], ON_DEVICE, ())
            return verdict(build_dir, self.folder / "python", group)

        if self.simulated is None:
            self.control.choose(0)
            self.simulated = seen()
            self.control.choose(mutant["number"])
            if self.simulated:
                device = f"on the simulated device: {ON_DEVICE}"
                self.report(f"left out, fails without a mutant {device}")
        self.control.take_reached()
        if not self.simulated and (found := seen()):
            return "killed", f"simulated device: {found}"
        reached = mutant["number"] in self.control.take_reached()
        return "survives" if reached else "not reached", ""


def _state_of(tests: Sequence[Test], seconds: float = 0) -> str:
    """Returns what a result of tests is valid for."""
    names = [f"{test.name} {test.state}" for test in tests]
    return hashlib.sha256("\n".join([*names, str(seconds)]).encode()).hexdigest()[:16]


def _test_from(line: str) -> Test:
    fields = json.loads(line)
    return Test(**{**fields, "reached": tuple(fields["reached"])})


def main(folder: Path, seconds: float) -> int:
    """Returns pytest's status.

    Args:
        folder: What tools/mutate_at_random.py has made.
        seconds: How much CPU the Python tests of one mutant may take.
    """
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    log = os.open(folder / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    run = Run(folder, seconds, output)
    run.try_in_cpp()
    costs = suite_costs.read().items()
    slow = [name for (what, name), cost in costs if what == "pytest" and cost > SLOW]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not long"]
    options += [f"--ignore={name}" for name in slow]
    tests = tests_for(mutant["file"] for mutant in run.mutants)
    status = pytest.main([*options, *tests], plugins=[PythonTests(folder, run.control, run)])
    if status != 0:
        run.report(f"pytest ends with {int(status)}: see {folder / 'pytest.log'}")
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), float(sys.argv[2])))
