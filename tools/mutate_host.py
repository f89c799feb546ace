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
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from host_mutants import GROUPS, HostGroup
from mutant_runs import Mutant, ninja, parse, read_results, run_all, table
from patience import patience
from simulated_cuda import is_built
from tracked_files import ROOT

PACKAGE = ROOT / "python" / "fastamp"
LIBRARIES = {"fastamp": "libfastamp.so.0.1", "fastamp_cuda": "libfastamp_cuda.so.0.1"}
NO_TESTS = (4, 5)  # pytest's exit status for a wrong command line, and for an empty selection
SECONDS = 300  # after which a run counts as hanging, on two idle cores
# What a failed run says, the most telling first.
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


def _quick(words: Sequence[str]) -> list[str]:
    """A compiler's command without optimization, and for one architecture if it is nvcc's.

    Nothing runs its device code: the simulated device has the emulator's.
    """
    architectures = [word for word in words if word.startswith("--generate-code=")]
    kept = ["-O0" if word == "-O3" else word for word in words if word not in architectures[1:]]
    kept = kept[1:] if Path(kept[0]).name == "ccache" else kept
    if "-MD" in kept:  # what ninja reads of a file's headers
        first = kept.index("-MD")
        del kept[first : kept.index("-MF") + 2]
    return [*kept, "-Xcicc", "-O0", "-Xptxas", "-O0"] if architectures else kept


class Build:
    """The commands of a configured build folder, whose libraries are built."""

    def __init__(self, folder: Path, ninja: str) -> None:
        """Reads how the libraries are compiled and linked."""
        self.folder = folder
        self.commands: dict[str, list[list[str]]] = {}
        for target in LIBRARIES:
            listing = [ninja, "-C", str(folder), "-t", "commands", target]
            result = subprocess.run(listing, capture_output=True, text=True, check=True)
            lines = (line.removeprefix(": && ") for line in result.stdout.splitlines())
            self.commands[target] = [shlex.split(line.removesuffix(" && :")) for line in lines]

    def _compiled_with(self, target: str, file: Path) -> tuple[list[str], Path] | None:
        """The command that compiles a file for a target, and the source that it names."""
        line = f'#include "{file}"'
        for words in self.commands[target]:
            if "-c" not in words:
                continue
            source = Path(words[words.index("-c") + 1])
            if source == file or (
                source.parent.name == "Unity" and line in source.read_text(encoding="utf-8")
            ):
                return words, source
        return None

    def _with_own_headers(self, words: list[str], target: str, work: Path) -> list[str]:
        """The command with headers that are precompiled as it compiles; makes them once."""
        header = next((word for word in words if word.endswith("/cmake_pch.hxx")), None)
        if header is None:
            return words
        own = work / target / "cmake_pch.hxx"
        compiled = Path(f"{own}.gch")
        if not compiled.is_file() or compiled.stat().st_mtime < Path(header).stat().st_mtime:
            own.parent.mkdir(exist_ok=True)
            shutil.copy(header, own)
            make = _quick(next(w for w in self.commands[target] if "c++-header" in w))
            make[make.index("-o") + 1] = str(compiled)
            self._run(make, f"{target}: precompiled headers")
        return [str(own) if word == header else word for word in words]

    def library(self, mutant: Mutant[HostGroup], work: Path) -> Path:
        """Makes the library that a changed source is in; returns it.

        Raises:
            RuntimeError: It does not compile, or no library has the source.
        """
        file = ROOT / mutant.group.file
        changed = work / file.name
        changed.write_text(mutant.text(), encoding="utf-8")
        target = next(t for t in LIBRARIES if self._compiled_with(t, file))
        words, source = self._compiled_with(target, file) or ([], file)
        compiled = changed
        if source != file:
            compiled = work / source.name
            text = source.read_text(encoding="utf-8")
            compiled.write_text(text.replace(str(file), str(changed)), encoding="utf-8")
        words = self._with_own_headers(_quick(words), target, work)
        words[words.index("-c") + 1] = str(compiled)
        place = words.index("-o") + 1
        before, words[place] = words[place], str(work / "changed.o")
        self._run(words, mutant.name)
        name = LIBRARIES[target]
        link = next(w for w in self.commands[target] if "-o" in w and w[w.index("-o") + 1] == name)
        link = [words[place] if word == before else word for word in link]
        link[link.index("-o") + 1] = str(work / name)
        self._run(link, mutant.name)
        return work / name

    def _run(self, words: list[str], problem: str) -> None:
        result = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"{problem}: cannot be built\n{result.stderr[-2000:]}")


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


def try_mutant(build: Build, mutant: Mutant[HostGroup], work: Path) -> str:
    """Returns what a test saw; "" if none did."""
    package = work / "package"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(PACKAGE, package / "fastamp", ignore=shutil.ignore_patterns("__pycache__"))
    if mutant.group.file.startswith("python/"):
        changed = package / Path(mutant.group.file).relative_to("python")
        changed.write_text(mutant.text(), encoding="utf-8")
    else:
        library = build.library(mutant, work)
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
    build = Build(options.build_dir.resolve(), ninja())

    def attempt(mutant: Mutant[HostGroup]) -> tuple[str, str]:
        return "simulated", try_mutant(build, mutant, work)

    survivors = run_all(mutants, attempt, stored)
    print(f"{len(mutants)} mutants of host code, {survivors} not seen")
    return int(survivors != 0)


if __name__ == "__main__":
    raise SystemExit(main())
