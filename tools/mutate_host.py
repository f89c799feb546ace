# SPDX-License-Identifier: Apache-2.0
"""Breaks host code for CUDA in known ways, and sees which test on the simulated device notices.

For each change in tools/host_mutants.py the file is compiled with it, alone or in its unity source,
and linked with the unchanged rest into a package of its own in the build folder; files of the
package are replaced there. Then its tests run. The build folder and the sources are only read. A
result is kept until the change or its file changes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from changed_library import LibraryBuild
from host_mutants import GROUPS, HostGroup
from mutant_runs import Mutant, ninja, parse, read_results, run_all, table
from patience import patience
from simulated_cuda import is_built
from tracked_files import ROOT

PACKAGE = ROOT / "python" / "fastamp"
NO_TESTS = (4, 5)  # pytest's exit status for a wrong command line, and for an empty selection
SECONDS = 300  # after which a run counts as hanging, on two idle cores
# What a failed run says, the most useful first.
SIGNS = (
    re.compile(r"simulated CUDA: (.* is touched by .*?) \("),
    re.compile(r"simulated CUDA: (a launch on a stream of device .*)"),
    re.compile(r"simulated CUDA: (.* while a stream is captured)"),
    re.compile(r"^E +(?:\w+\.)*(\w*Error.*)", re.MULTILINE),
    re.compile(r"^E +(assert.*)", re.MULTILINE),
    re.compile(r"^  (Expected all tensors.*|CHECK\(.*\))", re.MULTILINE),
)


MUTANTS = [
    Mutant(
        group,
        change,
        ROOT / group.file,
        f"{group.file}: {change.name}",
        (group.tests, group.late, *filter(None, [group.select, group.program])),
    )
    for group in GROUPS
    for change in group.changes
]


def verdict(build_dir: Path, package: Path, group: HostGroup) -> str:
    """Runs a group's tests with a package; returns what failed, or "" if they passed.

    Raises:
        RuntimeError: The group selects no test.
    """
    launcher = [sys.executable, str(ROOT / "tools" / "simulated_cuda.py")]
    launcher += ["--build-dir", str(build_dir), *(["--late"] if group.late else []), "--"]
    pytest = [sys.executable, "-m", "pytest", "-xqs", "-n", "0", "-m", "cuda or simulated"]
    pytest += ["-p", "no:cacheprovider", "-k", group.select, *group.tests]
    paths = [str(package), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    variables["LD_LIBRARY_PATH"] = str(package / "fastamp" / "lib")  # of a C++ program
    try:
        result = subprocess.run(
            [*launcher, *([str(build_dir / group.program)] if group.program else pytest)],
            cwd=ROOT,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience(SECONDS),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if result.returncode == 0:
        return ""
    if not group.program and result.returncode in NO_TESTS:
        raise RuntimeError(f"{group.file}: no test ran\n{result.stdout[-2000:]}")
    output = result.stdout + result.stderr
    found = next((match for sign in SIGNS if (match := sign.search(output))), None)
    return found.group(1).strip()[:90] if found else f"exit status {result.returncode}"


def try_mutant(build: LibraryBuild, mutant: Mutant[HostGroup], work: Path) -> str:
    """Returns what a test saw; "" if none did."""
    package = work / "package"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(PACKAGE, package / "fastamp", ignore=shutil.ignore_patterns("__pycache__"))
    if mutant.group.file.startswith("python/"):
        changed = package / Path(mutant.group.file).relative_to("python")
        changed.write_text(mutant.text(), encoding="utf-8")
    else:
        changed = work / Path(mutant.group.file).name
        changed.write_text(mutant.text(), encoding="utf-8")
        library = build.library({ROOT / mutant.group.file: changed}, work, optimized=False)
        shutil.copy(library, package / "fastamp" / "lib" / library.name)
    return verdict(build.folder, package, mutant.group)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every mutant was seen that can be."""
    options = parse(__doc__, arguments)
    mutants = [m for m in MUTANTS if options.only in m.name]
    work = options.build_dir.resolve() / "mutants" / "host"
    work.mkdir(parents=True, exist_ok=True)
    stored = work / "results.json"
    if options.table:
        print(table(mutants, read_results(stored)))
        return 0
    if not is_built(options.build_dir):
        print("left out: breaks of host code, which need the simulated device: a build with CUDA")
        return 0
    build = LibraryBuild(options.build_dir.resolve(), ninja())

    def attempt(mutant: Mutant[HostGroup]) -> tuple[str, str]:
        return "simulated", try_mutant(build, mutant, work)

    survivors = run_all(mutants, attempt, stored)
    print(f"{len(mutants)} mutants of host code, {survivors} not seen")
    return int(survivors != 0)


if __name__ == "__main__":
    raise SystemExit(main())
