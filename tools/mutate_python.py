# SPDX-License-Identifier: Apache-2.0
"""Breaks the Python scaler in places drawn at random, and sees whether a test notices.

Each break (tools/python_mutations.py) lives in the memory of a forked process only, which runs the
tests that execute the broken line, the quickest first, until one fails. Which tests those are is
traced once for each state of the files. Results are stored one by one in build/mutants, so a run
can be stopped and taken up again; one stays valid until its source changes. --table prints the
breaks that no test noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from patience import patience
from python_mutations import Mutation, mutations
from tracked_files import ROOT

SOURCES = ROOT / "python" / "fastamp" / "_scaler"
#: Tests that run the scaler in their own process.
TESTS = (
    "tests/python/scaler",
    "tests/python/dropin/test_apex.py",
    "tests/python/dropin/test_installed_scalers.py",
    "tests/python/graphed",
)
STORED = ROOT / "build" / "mutants"
SECONDS = 60  # after which a run counts as hanging, on two idle cores
NOTICED, UNNOTICED = 1, 0


@dataclass(frozen=True)
class Mutant:
    """A change of one file."""

    file: str
    mutation: Mutation

    @property
    def name(self) -> str:
        """File, line and change on one line."""
        old, new = (" ".join(text.split()) for text in (self.mutation.old, self.mutation.new))
        return f"{self.file}:{self.mutation.line}: {old} -> {new}"

    def digest(self) -> str:
        """Returns what a result is valid for."""
        return hashlib.sha256(f"{self.name}\n{self.mutation.source}".encode()).hexdigest()[:16]


def digest_of_files() -> str:
    """Returns what the trace of lines is valid for: the sources and the tests."""
    tests = [file for test in TESTS for file in (ROOT / test, *sorted((ROOT / test).rglob("*.py")))]
    files = [file for file in (*sorted(SOURCES.glob("*.py")), *tests) if file.is_file()]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def all_mutants(only: str = "") -> list[Mutant]:
    """Every change of every file, in a fixed order."""
    files = [file for file in sorted(SOURCES.glob("*.py")) if only in file.name]
    return [
        Mutant(file.name, mutation)
        for file in files
        for mutation in mutations(file.read_text(encoding="utf-8"))
    ]


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed source."""

    def __init__(self, name: str, source: str, origin: Path) -> None:
        self.name, self.source, self.origin = name, source, origin

    def find_spec(self, fullname: str, *_: Any) -> Any:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(self.origin))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self.origin)
        exec(compile(self.source, str(self.origin), "exec"), module.__dict__)


class _Tracer:
    """A pytest plugin that notes which lines of the sources each test runs, and for how long."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[float, set[str]]] = {}
        self.lines: set[str] = set()
        self.start = 0.0

    def _line(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        self.lines.add(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return self._line

    def _call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(str(SOURCES)) else None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        del nodeid
        self.lines, self.start = set(), time.process_time()
        threading.settrace(self._call)
        sys.settrace(self._call)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        if self.lines:
            self.tests[nodeid] = (time.process_time() - self.start, self.lines)


def _pytest(arguments: Sequence[str], plugins: Sequence[object] = ()) -> int:
    import pytest

    quiet = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "-rN"]
    return int(pytest.main([*quiet, *arguments], plugins=list(plugins)))


def trace(stored: Path) -> int:
    """Writes which tests run which lines; returns pytest's status."""
    tracer = _Tracer()
    status = _pytest(TESTS, [tracer])
    if status != 0:
        return status
    tests = {test: [cost, sorted(lines)] for test, (cost, lines) in tracer.tests.items()}
    stored.write_text(json.dumps(tests), encoding="utf-8")
    return status


def in_child(work: Callable[[], int], seconds: float) -> int | None:
    """Runs a function in a forked process; returns its exit status, None if it hangs."""
    process = os.fork()
    if process == 0:
        os.setpgid(0, 0)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        status = NOTICED
        try:
            status = work()
        finally:
            os._exit(status)
    end = time.monotonic() + patience(seconds)
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return status
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def try_mutant(mutant: Mutant, tests: Sequence[str]) -> str:
    """Returns "killed", "hangs", "survives", or "not reached" if no test runs the line."""
    if not tests:
        return "not reached"

    def work() -> int:
        file = SOURCES / mutant.file
        name = f"fastamp._scaler.{file.stem}"
        sys.meta_path.insert(0, _Changed(name, mutant.mutation.source, file))
        return NOTICED if _pytest(tests) != 0 else UNNOTICED

    status = in_child(work, SECONDS)
    return "hangs" if status is None else "survives" if status == UNNOTICED else "killed"


def tests_of(mutant: Mutant, traced: dict[str, Any]) -> list[str]:
    """Tests that run a line, the quickest first; those that run its file, if the import does."""
    change = mutant.mutation
    at = {f"{mutant.file}:{line}" for line in range(change.line, change.end + 1)}
    found = [(cost, test) for test, (cost, lines) in traced.items() if not at.isdisjoint(lines)]
    if not found:
        here = f"{mutant.file}:"
        found = [
            (cost, test)
            for test, (cost, lines) in traced.items()
            if any(line.startswith(here) for line in lines)
        ]
    return [test for _, test in sorted(found)]


def summary(mutants: Sequence[Mutant], results: dict[str, Any]) -> str:
    """Returns how many were noticed, and a line for each that was not."""
    known = [(m, results[m.digest()]["is"]) for m in mutants if m.digest() in results]
    alive = [m for m, verdict in known if verdict not in ("killed", "hangs")]
    unseen = [f"- {results[m.digest()]['is']}: {m.name}" for m in alive]
    killed = len(known) - len(alive)
    return "\n".join([*unseen, f"{len(known)} of {len(mutants)} run, {killed} noticed"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if at least 90 % of those that were run are noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="how many breaks are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="TEXT", help="files with this in their name")
    parser.add_argument("--table", action="store_true", help="print the stored results and end")
    options = parser.parse_args(arguments)
    STORED.mkdir(parents=True, exist_ok=True)
    every = all_mutants(options.only)
    drawn = random.Random(options.seed).sample(every, min(options.count, len(every)))
    stored, traces = STORED / "python.json", STORED / f"python_lines_{digest_of_files()}.json"
    results = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else {}
    if not options.table:
        import torch  # noqa: F401, before the forks, and without fastamp

        if not traces.is_file() and in_child(lambda: trace(traces), 60 * SECONDS) != 0:
            raise SystemExit("the tests fail, or hang, without any change")
        traced = json.loads(traces.read_text(encoding="utf-8"))
        for number, mutant in enumerate(drawn, 1):
            if mutant.digest() not in results:
                verdict = try_mutant(mutant, tests_of(mutant, traced))
                results[mutant.digest()] = {"is": verdict, "name": mutant.name}
                stored.write_text(json.dumps(results, indent=1), encoding="utf-8")
            outcome = results[mutant.digest()]["is"]
            print(f"{number:3}/{len(drawn)} {outcome:11} {mutant.name}", flush=True)
    print(summary(drawn, results))
    known = [results[m.digest()]["is"] for m in drawn if m.digest() in results]
    noticed = sum(verdict in ("killed", "hangs") for verdict in known)
    return int(10 * noticed < 9 * len(known))


if __name__ == "__main__":
    raise SystemExit(main())
