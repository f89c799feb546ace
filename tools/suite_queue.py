# SPDX-License-Identifier: Apache-2.0
"""The queue of `make test`: ctest entries and pytest files, a few at a time, the longest first.

A pytest file runs in a child that is forked from this process, in which torch and pytest are
imported already: it costs no start-up, and what it does to the process ends with it. Whatever is
no clear success is a failure: a crash, a time limit, no summary line, no test collected.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import suite_parts
import warm_python
from patience import measure_again

ROOT = Path(__file__).resolve().parent.parent
SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
SKIPPED = 77  # SKIP_RETURN_CODE of cmake/FastampTest.cmake
PYTEST_SUMMARY = re.compile(
    r"^=+ (.*\b(?:passed|failed|errors?|skipped|deselected|no tests ran)\b.*) =+$"
)
# An empty selection is no success of a C++ program, whatever its exit status.
CATCH2_PASSED = re.compile(
    r"^(All tests passed \(\d+ assert|test cases: .*\b\d+ passed)", re.MULTILINE
)
WORDS = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "error")


@dataclass(frozen=True)
class Entry:
    """Entry: what the queue runs as one.

    Attributes:
        runner: ``ctest`` or ``pytest``.
        name: The name that ctest has for it, or the file, relative to the root.
        command: A program and its arguments, or pytest's arguments.
        folder: Where a program is run.
        environment: Variables that are added to this process's.
        needs: What no two entries may use at the same time; "" if nothing.
        part: What it belongs to: the product, or one of ``suite_parts.PARTS``.
    """

    runner: str
    name: str
    command: tuple[str, ...]
    folder: Path = ROOT
    environment: tuple[tuple[str, str], ...] = ()
    needs: str = ""
    part: str = suite_parts.PRODUCT


@dataclass
class Result:
    """Outcome of an entry.

    Attributes:
        entry: The entry.
        counts: Tests by outcome: those of a pytest file; a ctest entry counts as one.
        problem: Why it counts as failed; "" if it passed.
        cpu: Seconds of CPU time, those of all processes that it started included.
        wall: Seconds.
        output: All it printed.
        log: The file that has it.
    """

    entry: Entry
    counts: Counter[str]
    problem: str
    cpu: float
    wall: float
    output: str
    log: Path


@dataclass
class Running:
    """An entry that is being run: its process, the file with its output, when it is too late."""

    entry: Entry
    pid: int
    log: Path
    start: float
    limit: float
    pidfd: int
    too_long: bool = False

    def end(self) -> None:
        """Ends the process and all that it started."""
        # Before it has a session of its own, only it can be ended.
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, signal.SIGKILL)


def preload() -> None:
    """Imports what every pytest file needs, before this process forks.

    Not fastamp: the programs that tests run are forked, too, and import it by themselves.
    """
    if importlib.util.find_spec("fastamp") is None:  # installed: another build of it may be tested
        sys.path[:0] = [str(ROOT / "python")]
    # hypothesis: its plugin for pytest imports it in any case, and rewrites each of its modules.
    for name in ("torch", "pytest", "hypothesis", "expecttest"):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def start(entry: Entry, log: Path, limit: float) -> Running:
    """Starts an entry in a session of its own, with its output in a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("wb") as output:
        if entry.runner == "ctest":
            process = subprocess.Popen(
                entry.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=entry.folder,
                env={**os.environ, **dict(entry.environment)},
                start_new_session=True,
            )
            process.returncode = 0  # wait4 below reaps it, not Popen
            pid = process.pid
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                _become_pytest(entry, output.fileno())
    return Running(entry, pid, log, began, began + limit, os.pidfd_open(pid))


def _become_pytest(entry: Entry, output: int) -> None:
    """Turns this child into a pytest of one entry; does not return."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(entry.folder)
    os.environ.update(dict(entry.environment))
    # What multiprocessing starts would import the main program: no part of the tests.
    main = sys.modules["__main__"]
    main.__spec__ = None
    vars(main).pop("__file__", None)
    if "torch" in sys.modules:
        warm_python.begin()
    measure_again()  # the machine may have become busy since this process began
    import pytest

    stderr = os.dup(2)  # pytest may leave 2 as it has it while tests run
    try:
        status = pytest.main(list(entry.command))
    except BaseException:
        os.write(stderr, traceback.format_exc().encode())
        raise
    finally:
        warm_python.end()
    # A usual exit, with what runs at it: a crash there is a crash.
    raise SystemExit(status)


def judge(entry: Entry, status: int, output: str) -> tuple[Counter[str], str]:
    """Returns the tests by outcome, and why an entry counts as failed; "" if it passed.

    Args:
        entry: The entry.
        status: Its exit status; negative: the signal that ended it.
        output: All it printed.
    """
    if entry.runner == "ctest":
        if status == SKIPPED:
            return Counter(skipped=1), ""
        problem = ended_badly(status)
        if not problem and not CATCH2_PASSED.search(output):
            problem = "ended without a summary, or ran no test"
        return Counter({"failed" if problem else "passed": 1}), problem
    lines = [line.strip() for line in output.splitlines()]
    found = [match for match in map(PYTEST_SUMMARY.match, lines) if match]
    counts = count(found[-1][1]) if found else Counter[str]()
    problem = ended_badly(status)
    if not found:
        problem = f"{problem or 'exit status 0'}, ended without a summary"
    elif status == 5 or not set(counts) - {"deselected"}:
        problem = "collected no test"
    if problem and not counts["failed"] + counts["error"]:
        counts["error"] += 1
    return counts, problem


def ended_badly(status: int) -> str:
    """Returns how a process ended, "" if well."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"exit status {status}" if status else ""


def count(summary: str) -> Counter[str]:
    """Returns the numbers of a summary line of pytest."""
    found = re.findall(rf"(\d+) ({'|'.join(WORDS)})s?\b", summary)
    return Counter({word: int(number) for number, word in found})


def run(
    entries: Iterable[Entry],
    processes: int,
    logs: Path,
    limits: Mapping[str, float],
    wanted: Callable[[Entry], bool] = lambda _: True,
) -> Iterable[Result]:
    """Runs entries in their order, so many at a time; yields each as it ends.

    Args:
        entries: What to run.
        processes: How many at a time.
        logs: Folder for what they print.
        limits: Seconds by runner after which an entry counts as hanging.
        wanted: Whether an entry that waits is to be begun; asked again as others end.
    """
    waiting, running, owner = list(entries), list[Running](), os.getpid()
    adopt_orphans(True)
    try:
        while waiting or running:
            waiting = list(filter(wanted, waiting))
            used = {one.entry.needs for one in running} - {""}
            while len(running) < processes and (entry := first_free(waiting, used)):
                waiting.remove(entry)
                used |= {entry.needs} - {""}
                log = logs / f"{entry.runner}-{re.sub(r'[^A-Za-z0-9_.-]', '-', entry.name)}.log"
                running.append(start(entry, log, limits[entry.runner]))
            for ended in wait(running):
                running.remove(ended)
                yield reap(ended)
    finally:
        if os.getpid() == owner:  # a forked child's exit comes here too
            for one in running:
                one.end()
            adopt_orphans(False)


def adopt_orphans(adopt: bool) -> None:
    """Says whether processes whose parents end become children of this one."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def first_free(waiting: Sequence[Entry], used: Collection[str]) -> Entry | None:
    """Returns the first entry that needs nothing that is in use; None if there is none."""
    return next((entry for entry in waiting if entry.needs not in used), None)


def wait(running: Sequence[Running]) -> list[Running]:
    """Waits until at least one has ended; ends those whose time is over."""
    poll = select.poll()
    for one in running:
        poll.register(one.pidfd, select.POLLIN)
    while True:
        now = time.monotonic()
        for one in running:
            if now > one.limit and not one.too_long:
                one.too_long = True
                one.end()
        nearest = min((one.limit for one in running if not one.too_long), default=now + 60)
        ready = {fd for fd, _ in poll.poll(1e3 * max(nearest - now, 0.05))}
        if ready:
            return [one for one in running if one.pidfd in ready]


def reap(ended: Running) -> Result:
    """Collects what is left of a process that has ended."""
    _, status, usage = os.wait4(ended.pid, 0)
    os.close(ended.pidfd)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(ended.pid, signal.SIGKILL)  # what it has left running
    wall = time.monotonic() - ended.start
    output = ended.log.read_text(encoding="utf-8", errors="replace")
    counts, problem = judge(ended.entry, os.waitstatus_to_exitcode(status), output)
    if ended.too_long:
        problem = f"ran into its time limit, {ended.limit - ended.start:.0f} s"
    cpu = usage.ru_utime + usage.ru_stime + collect_orphans(ended.pid)
    return Result(ended.entry, counts, problem, cpu, wall, output, ended.log)


def collect_orphans(group: int) -> float:
    """Waits for the adopted processes of a group to end; returns their CPU time in seconds.

    Such is the server that forks ranks (multiprocessing's), for which nobody waits.
    """
    seconds = 0.0
    with contextlib.suppress(ChildProcessError):
        while True:
            _, _, usage = os.wait4(-group, 0)
            seconds += usage.ru_utime + usage.ru_stime
    return seconds


def summaries(results: Sequence[Result], seconds: float) -> tuple[str, str]:
    """Returns the totals as ctest and as pytest would print them, in one line each."""
    programs = [result for result in results if result.entry.runner == "ctest"]
    failed = sum(bool(result.problem) for result in programs)
    share = 100 * (len(programs) - failed) // max(len(programs), 1)
    tests = "test" if failed == 1 else "tests"
    ctest = f"{share}% tests passed, {failed} {tests} failed out of {len(programs)}"
    if not programs:
        ctest = "No tests were found!!!"
    total: Counter[str] = Counter()
    for result in results:
        if result.entry.runner == "pytest":
            total.update(result.counts)
    parts = [f"{total[word]} {plural(word, total[word])}" for word in WORDS if total[word]]
    text = f" {', '.join(parts) or 'no tests ran'} in {seconds:.2f}s "
    return ctest, text.center(80, "=")


def plural(word: str, number: int) -> str:
    """Returns the word as pytest counts with it."""
    return "errors" if word == "error" and number != 1 else word
