# SPDX-License-Identifier: Apache-2.0
"""Breaks the CUDA kernels and their host code in known ways, and sees which emulated test notices.

For each change in tools/{kernel,step,float8}_mutants.py, the sources that it concerns are compiled
with the change, linked with the unchanged rest of the emulated tests (tests/cpp/cuda_on_cpu), and
the tests of its kernel are run: plain, under AddressSanitizer with UBSan, under ThreadSanitizer,
until one fails. The build folder is only read. A result is kept until the change or its file
changes, so a run can be stopped and taken up again; --table prints the results for docs/cuda.md.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import float8_mutants
import kernel_mutants
import step_mutants
from mutant_kinds import Group
from mutant_runs import Mutant, ninja, parse, read_results, run_all, table
from patience import patience
from tracked_files import ROOT

SOURCES = ROOT / "src"
KERNELS = SOURCES / "kernels" / "cuda"
FLAVOURS = ("plain", "asan", "tsan")
SECONDS = 40  # after which a run counts as hanging, on two idle cores
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66 history_size=0",
    "OMP_NUM_THREADS": "1",
}
# What a failed run says, and a word for it.
SIGNS = (
    ("emulator: block", "emulator: a barrier or collective is not reached by all"),
    ("emulator: ", None),
    ("ThreadSanitizer: data race", "data race"),
    ("ThreadSanitizer: ", None),
    ("AddressSanitizer: ", None),
    ("runtime error: ", None),
    ("SIGSEGV", "crash"),
    ("assertions:", "wrong result"),
)


GROUPS = kernel_mutants.GROUPS + step_mutants.GROUPS + float8_mutants.GROUPS
MUTANTS = [
    Mutant(
        group,
        change,
        KERNELS / group.file,
        f"{group.file}: {change.name} ({group.tests[0]})",
        (group.sources, group.tests),
    )
    for group in GROUPS
    for change in group.changes
]


class Build:
    """The commands of a configured build folder, whose emulated tests are built."""

    def __init__(self, folder: Path, ninja: str) -> None:
        """Reads the commands of all flavours that the folder has."""
        self.folder = folder
        self.commands = {
            flavour: self._commands(ninja, f"fastamp_emulated_{flavour}") for flavour in FLAVOURS
        }

    def _commands(self, ninja: str, target: str) -> list[str]:
        listing = [ninja, "-C", str(self.folder), "-t", "commands", target]
        result = subprocess.run(listing, capture_output=True, text=True, check=True)
        return [line for line in result.stdout.splitlines() if target in line]

    def compile(
        self, flavour: str, source: str, mutant: Mutant[Group], work: Path
    ) -> tuple[str, Path]:
        """Compiles a source with the change; returns the object's name in the build, and its path.

        Raises:
            RuntimeError: It does not compile.
        """
        kernels = f"fastamp_emulated_{flavour}_kernels.dir"
        ending = f"/{source}.o"
        for line in self.commands[flavour]:
            words = shlex.split(line)
            if "-c" in words and kernels in line and words[words.index("-o") + 1].endswith(ending):
                break
        else:
            raise RuntimeError(f"no compile command of {source} in {self.folder}")
        name = words[words.index("-o") + 1]
        target = work / f"{source}.{flavour}.o"
        changed = work / "src" / "kernels" / "cuda" / mutant.group.file
        if changed.name == source:
            words[words.index("-c") + 1] = str(changed)
        words[words.index("-o") + 1] = str(target)
        # After the shim, before the sources: what the changed file does not shadow is found there.
        place = next(i for i, word in enumerate(words) if word == f"-I{SOURCES}")
        words.insert(place, f"-I{work / 'src'}")
        self._run(words, f"{mutant.name}: {source} does not compile")
        return name, target

    def link(self, flavour: str, objects: dict[str, Path], work: Path) -> Path:
        """Links the tests of a flavour with some objects replaced; returns the program."""
        line = self.commands[flavour][-1].removeprefix(": && ").removesuffix(" && :")
        words = [str(objects.get(word, word)) for word in shlex.split(line)]
        program = work / f"tests.{flavour}"
        words[words.index("-o") + 1] = str(program)
        self._run(words, "does not link")
        return program

    def _run(self, words: list[str], problem: str) -> None:
        result = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"{problem}:\n{result.stderr[-2000:]}")


def verdict(program: Path, tests: Sequence[str]) -> str:
    """Runs tests; returns what failed, or "" if they passed."""
    command = [str(program), ",".join(f"[{tag}]" for tag in tests)]
    environment = os.environ | ENVIRONMENT
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience(SECONDS),
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if result.returncode == 0:
        return ""
    output = result.stdout + result.stderr
    for sign, word in SIGNS:
        found = next((line for line in output.splitlines() if sign in line), None)
        if found is not None:
            reason = word or found.split(sign, 1)[1]
            return re.split(r" on address| \(/", reason)[0].strip()[:60]
    return f"exit status {result.returncode}"


def try_mutant(build: Build, mutant: Mutant[Group], work: Path) -> tuple[str, str]:
    """Returns the flavour that caught a mutant, and what it saw; both "" if none did."""
    changed = work / "src" / "kernels" / "cuda" / mutant.group.file
    changed.parent.mkdir(parents=True, exist_ok=True)
    changed.write_text(mutant.text(), encoding="utf-8")
    try:
        for flavour in FLAVOURS:
            objects = dict(build.compile(flavour, s, mutant, work) for s in mutant.group.sources)
            seen = verdict(build.link(flavour, objects, work), mutant.group.tests)
            if seen:
                return flavour, seen
        return "", ""
    finally:
        changed.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every mutant was caught that can be."""
    options = parse(__doc__, arguments)
    work = options.build_dir.resolve() / "mutants"
    work.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work / "src", ignore_errors=True)  # of a run that was stopped
    stored = work / "results.json"
    if options.table:
        print(table(MUTANTS, read_results(stored)))
        return 0
    mutants = [mutant for mutant in MUTANTS if options.only in mutant.name]
    build = Build(options.build_dir.resolve(), ninja())
    survivors = run_all(mutants, lambda mutant: try_mutant(build, mutant, work), stored)
    print(f"{len(mutants)} mutants, {survivors} not caught")
    return int(survivors != 0)


if __name__ == "__main__":
    raise SystemExit(main())
