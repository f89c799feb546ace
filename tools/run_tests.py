# SPDX-License-Identifier: Apache-2.0
"""Runs the C++ and the Python tests from one queue; ends with both runners' summary lines.

By itself it runs what tests the product; --all runs everything, --changed what the changes since
the base of this branch can touch. tools/suite_parts.py says what that is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import suite_batches
import suite_costs
import suite_parts
import suite_queue
from patience import patience
from suite_queue import Entry, Result

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2  # more would each have too few threads for what tests threads
CTEST_SECONDS = 600  # after which a C++ program counts as hanging, on two idle cores
PYTEST_SECONDS = 3600  # and a Python file; its tests have limits of their own
USUAL_SECONDS = 30  # what an entry without a cost is taken to need
# Folders that run in one process: a fixture of the session does the work of all their files.
TOGETHER = ("tests/python/distributed",)
# Beginnings of files that build in the build folder of make, where only one ninja may run.
BUILDERS = (
    "tests/python/benchmarks/",
    "tests/python/packaging/",
    "tests/python/simulated_cuda/test_make_simcuda.py",
    "tests/python/test_demo.py",
)
LOGS = ROOT / "build" / "tests"
# One at a time writes what pytest remembers of its last run; that is none of these.
PYTEST_OPTIONS = ("-p", "no:cacheprovider", "-p", "no:xdist")
PRELOADED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # hypothesis is imported already


def find_ctest() -> str:
    """Returns ctest's path; it lies beside cmake.

    Raises:
        SystemExit: It is not installed.
    """
    beside = shutil.which("ctest", path=str(Path(sys.executable).parent))
    ctest = beside or shutil.which("ctest")
    if ctest is None:
        raise SystemExit("ctest is not installed: it comes with cmake")
    return ctest


def ctest_command(build_dir: Path, label: str = "", processes: int = 1) -> list[str]:
    """Returns the ctest call, for tests with a label if one is given."""
    selection = ["-L", label] if label else []
    return [
        find_ctest(),
        "--test-dir",
        str(build_dir),
        "--output-on-failure",
        "--no-tests=error",
        "--timeout",
        str(round(patience(CTEST_SECONDS))),
        "--parallel",
        str(processes),
        *selection,
    ]


def ctest_entries(build_dir: Path, parts: frozenset[str], label: str = "") -> list[Entry]:
    """Returns the C++ tests of a build folder.

    Args:
        build_dir: The folder.
        parts: The parts to run beside the product.
        label: Only the tests with this one.

    Raises:
        SystemExit: It holds no tests.
    """
    command = [find_ctest(), "--test-dir", str(build_dir), "--show-only=json-v1"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    tests = json.loads(listed.stdout)["tests"] if listed.returncode == 0 else []
    if not tests:
        raise SystemExit(f"{build_dir} holds no build with tests: {listed.stderr.strip()}")
    entries = []
    for test in tests:
        properties = {item["name"]: item["value"] for item in test["properties"]}
        labels = properties.get("LABELS", [])
        part = "flavours" if "flavours" in labels else suite_parts.PRODUCT
        if (label and label not in labels) or part not in {suite_parts.PRODUCT, *parts}:
            continue
        pairs = [text.split("=", 1) for text in properties.get("ENVIRONMENT", [])]
        entries.append(
            Entry(
                "ctest",
                test["name"],
                tuple(test.get("command", [str(build_dir / "not-built")])),
                Path(properties.get("WORKING_DIRECTORY", build_dir)),
                tuple((name, value) for name, value in pairs),
                part=part,
            )
        )
    return entries


def test_files() -> list[str]:
    """Returns all files of Python tests, relative to the root."""
    folders = [ROOT / "tests" / name for name in ("python", "simulated_cuda")]
    found = [path for folder in folders for path in folder.rglob("test_*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def files_by_entry(files: Iterable[str]) -> dict[str, list[str]]:
    """Returns the files that run in one process, by the name of the entry: the file or a folder."""
    found: dict[str, list[str]] = {}
    for file in files:
        folders = (name for name in TOGETHER if file.startswith(f"{name}/"))
        found.setdefault(next(folders, file), []).append(file)
    return found


def has_long_tests(files: Iterable[str]) -> bool:
    """Returns whether some test of these files is marked long."""
    return any("pytest.mark.long" in (ROOT / file).read_text(encoding="utf-8") for file in files)


def pytest_entries(parts: frozenset[str]) -> list[Entry]:
    """Returns the Python tests of the product, and of some parts; long tests by themselves."""
    entries = []
    for name, files in files_by_entry(test_files()).items():
        part = suite_parts.of_longest(suite_parts.TESTS, name) or suite_parts.PRODUCT
        command = (*files, *PYTEST_OPTIONS, *PRELOADED)
        needs = "build folder" if name.startswith(BUILDERS) else ""
        rest = Entry("pytest", name, (*command, "-m", "not long"), needs=needs, part=part)
        entries.append(rest)
        if has_long_tests(files):
            long = (*command, "-m", "long")
            entries.append(Entry("pytest", f"{name}, long", long, needs=needs, part="long"))
    return [entry for entry in entries if entry.part in {suite_parts.PRODUCT, *parts}]


def gpu_name() -> str:
    """Returns the GPU that torch sees, or "" where there is none."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip()


def run_queue(
    entries: Iterable[Entry],
    processes: int,
    logs: Path = LOGS,
    minutes: float | None = None,
    costs: suite_costs.Costs | None = None,
) -> list[Result]:
    """Runs entries, the longest first, says what came of each, and shows what failed.

    Args:
        entries: What to run.
        processes: How many at a time.
        logs: Folder for what they print.
        minutes: The product comes first, and nothing else is begun that would, by its cost and the
            pace of the machine, go on after so many; None: no limit.
        costs: Of the entries; None: those that were recorded.
    """
    by_name = {(entry.runner, entry.name): entry for entry in entries}
    costs = suite_costs.read() if costs is None else costs
    order = suite_costs.longest_first(by_name, costs)
    end = math.inf
    if minutes is not None:
        order.sort(key=lambda name: by_name[name].part != suite_parts.PRODUCT)
        end = time.monotonic() + 60 * minutes

    def in_time(entry: Entry) -> bool:
        cost = patience(costs.get((entry.runner, entry.name), USUAL_SECONDS))
        return entry.part == suite_parts.PRODUCT or time.monotonic() + cost < end

    limits = {"ctest": patience(CTEST_SECONDS), "pytest": patience(PYTEST_SECONDS)}
    results = []
    waiting = map(by_name.__getitem__, order)
    for result in suite_queue.run(waiting, processes, logs, limits, in_time):
        results.append(result)
        tests = ", ".join(f"{number} {word}" for word, number in result.counts.items())
        verdict = f"FAILED: {result.problem}" if result.problem else tests
        place = f"[{len(results)}/{len(order)}]"
        print(f"{place:>10} {result.wall:6.1f} s  {result.entry.name}: {verdict}", flush=True)
        if result.problem:
            print(result.output, flush=True)
    return results


def report(results: Sequence[Result], seconds: float, late: Sequence[Entry] = ()) -> int:
    """Prints the failures, what was not begun in time, and the summary lines.

    Returns:
        The exit status.
    """
    failed = [result for result in results if result.problem]
    for result in failed:
        log = os.path.relpath(result.log, ROOT)
        print(f"FAILED {result.entry.name}: {result.problem}; all it printed: {log}")
        lines = result.output.splitlines()
        print("".join(f"  {line}\n" for line in lines if line.startswith(("FAILED ", "ERROR "))))
    spent = sum(result.cpu for result in results)
    skipped = [r.entry.name for r in results if r.entry.runner == "ctest" and r.counts["skipped"]]
    if skipped:
        print(f"skipped programs: {', '.join(skipped)}")
    if late:
        print(f"left out, for want of time: {', '.join(entry.name for entry in late)}")
    print(f"{len(results)} programs and files, {spent:.0f} s of CPU time in {seconds:.0f} s")
    print("\n".join(suite_queue.summaries(results, seconds)), flush=True)
    return int(bool(failed) or not results)


def chosen_parts(options: argparse.Namespace) -> frozenset[str]:
    """Returns the parts to run beside the product, and says why these."""
    if options.all:
        return suite_parts.ALL
    parts = frozenset(options.part)
    if options.changed:
        files = suite_parts.changed()
        if files is None:
            print("no base to compare with: every part is run (FASTAMP_BASE=<commit> names one)")
            return suite_parts.ALL
        parts |= suite_parts.touched(files)
        print(f"{len(files)} files changed: parts {', '.join(sorted(parts)) or 'none'}")
    return parts


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-dir", type=Path, required=True)
    parser.add_argument("--all", action="store_true", help="every part, as make test-all")
    parser.add_argument("--changed", action="store_true", help="the parts that changes can touch")
    parser.add_argument(
        "--part", action="append", default=[], choices=suite_parts.PARTS, help="this one too"
    )
    parser.add_argument("--cuda", action="store_true", help="only tests that need a GPU")
    parser.add_argument(
        "--beside-cuda",
        nargs="+",
        default=(),
        metavar="PATH",
        help="only Python tests below these that need no GPU, to see what one's presence changes",
    )
    parser.add_argument(
        "--at-most", type=float, metavar="SECONDS", help="only what took no more CPU time than this"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="the product first, and of the parts nothing that would go on for longer than this",
    )
    parser.add_argument("--emulated", action="store_true", help="only emulated kernels, all cases")
    parser.add_argument("--only", default="", metavar="TEXT", help="only names with this in them")
    parser.add_argument("--logs", type=Path, default=LOGS, help="where they print")
    parser.add_argument("--record", action="store_true", help="write tests/costs.tsv")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if everything passed."""
    options = parse(arguments)
    start = time.monotonic()
    if options.emulated:
        os.environ["FASTAMP_EMULATE_LONG"] = "1"
        return subprocess.call(ctest_command(options.build_dir, "emulated", PROCESSES), cwd=ROOT)
    gpu = gpu_name()
    if (options.cuda or options.beside_cuda) and not gpu:
        raise SystemExit("no CUDA GPU here: nothing was tested")
    print(f"GPU: {gpu}" if gpu else "no CUDA GPU here: tests that need one are skipped", flush=True)
    if not gpu:
        # Else threads that wait spin on the cores that the other process needs.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if options.cuda:
        entries = ctest_entries(options.build_dir, suite_parts.ALL, "cuda")
        entries.append(
            Entry("pytest", "tests that need a GPU", ("-m", "cuda", *PYTEST_OPTIONS, *PRELOADED))
        )
    elif options.beside_cuda:
        os.environ["FASTAMP_TESTS_BESIDE_CUDA"] = "1"
        below = tuple(options.beside_cuda)
        entries = [entry for entry in pytest_entries(frozenset()) if entry.name.startswith(below)]
    else:
        parts = chosen_parts(options)
        if "long" in parts:
            os.environ["FASTAMP_LONG"] = "1"  # C++ tests repeat more often
        entries = [*ctest_entries(options.build_dir, parts), *pytest_entries(parts)]
    entries = [entry for entry in entries if options.only in entry.name]
    costs = suite_costs.read()
    if options.at_most is not None:
        entries = [e for e in entries if costs.get((e.runner, e.name), 0.0) <= options.at_most]
    if not options.record:  # by files
        entries = suite_batches.batched(entries, costs)
    suite_queue.preload()
    # On a GPU memory and time are tested, of which a second process would take some.
    alone = gpu and "SIMULATED_CUDA_DEVICES" not in os.environ
    results = run_queue(entries, 1 if alone else PROCESSES, options.logs, options.minutes, costs)
    if options.record:
        costs = {} if options.all else suite_costs.read()
        costs |= suite_costs.compilations(options.build_dir)
        costs |= {(r.entry.runner, r.entry.name): r.cpu for r in results}
        suite_costs.write(costs)
    ran = {(result.entry.runner, result.entry.name) for result in results}
    late = [entry for entry in entries if (entry.runner, entry.name) not in ran]
    return report(results, time.monotonic() - start, late)


if __name__ == "__main__":
    raise SystemExit(main())
