# SPDX-License-Identifier: Apache-2.0
"""Breaks the CUDA kernels and their host code in known ways, and sees which emulated test notices.

For each change in tools/{kernel,step,float8}_mutants.py, the sources that it concerns are compiled
with the change, linked with the unchanged rest of the emulated tests (tests/cpp/cuda_on_cpu), and
the tests of its kernel are run: plain, under AddressSanitizer with UBSan, under ThreadSanitizer,
until one fails. The build folder is only read. A result is kept until the change or its file
changes, so a run can be stopped and taken up again; --table prints the results for docs/cuda.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import float8_mutants
import kernel_mutants
import step_mutants
from mutant_kinds import Change, Group
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


@dataclass(frozen=True)
class Mutant:
    """A change with what its group says of it."""

    group: Group
    change: Change

    @property
    def name(self) -> str:
        """The file and what is broken: no two mutants share it."""
        return f"{self.group.file}: {self.change.name} ({self.group.tests[0]})"

    def text(self) -> str:
        """Returns the changed file.

        Raises:
            ValueError: The old text does not occur exactly once.
        """
        text = (KERNELS / self.group.file).read_text(encoding="utf-8")
        if (times := text.count(self.change.old)) != 1:
            raise ValueError(f"{self.name}: the text to replace occurs {times} times")
        return text.replace(self.change.old, self.change.new)

    def digest(self) -> str:
        """Returns what a result is valid for."""
        parts = repr((self.text(), self.group.sources, self.group.tests))
        return hashlib.sha256(parts.encode()).hexdigest()


GROUPS = kernel_mutants.GROUPS + step_mutants.GROUPS + float8_mutants.GROUPS
MUTANTS = [Mutant(group, change) for group in GROUPS for change in group.changes]


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

    def compile(self, flavour: str, source: str, mutant: Mutant, work: Path) -> tuple[str, Path]:
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
            told = word or found.split(sign, 1)[1]
            return re.split(r" on address| \(/", told)[0].strip()[:60]
    return f"exit status {result.returncode}"


def try_mutant(build: Build, mutant: Mutant, work: Path) -> dict[str, str]:
    """Returns the flavour that caught a mutant, and what it saw; "nothing" if none did."""
    changed = work / "src" / "kernels" / "cuda" / mutant.group.file
    changed.parent.mkdir(parents=True, exist_ok=True)
    changed.write_text(mutant.text(), encoding="utf-8")
    try:
        for flavour in FLAVOURS:
            objects = dict(build.compile(flavour, s, mutant, work) for s in mutant.group.sources)
            seen = verdict(build.link(flavour, objects, work), mutant.group.tests)
            if seen:
                return {"by": flavour, "seen": seen}
        return {"by": "nothing", "seen": ""}
    finally:
        changed.unlink()


def table(mutants: Sequence[Mutant], results: dict[str, dict[str, str]]) -> str:
    """Returns the results in Markdown, then the mutants without one."""
    rows = ["| File | Break | Caught by | Seen |", "|---|---|---|---|"]
    open_ones = []
    for mutant in mutants:
        result = results.get(mutant.name)
        if result is None or result["digest"] != mutant.digest():
            open_ones.append(f"- {mutant.name}")
            continue
        seen = result["seen"] or mutant.change.equivalent or "**survives**"
        rows.append(f"| {mutant.group.file} | {mutant.change.name} | {result['by']} | {seen} |")
    return "\n".join([*rows, "", f"Not run yet: {len(open_ones)}", *open_ones])


def run_all(mutants: Sequence[Mutant], build: Build, work: Path, stored: Path) -> int:
    """Runs what has no result yet; returns the number of mutants that should be caught and are not.

    Results are stored one by one, so that a run can be stopped and taken up again.
    """
    results = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else {}
    survivors = 0
    for number, mutant in enumerate(mutants, 1):
        result = results.get(mutant.name)
        start = time.monotonic()
        if result is None or result["digest"] != mutant.digest():
            result = try_mutant(build, mutant, work)
            result |= {"digest": mutant.digest(), "date": date.today().isoformat()}
            results[mutant.name] = result
            stored.write_text(json.dumps(results, indent=1), encoding="utf-8")
        survives = result["by"] == "nothing" and not mutant.change.equivalent
        survivors += survives
        outcome = "SURVIVES" if survives else f"{result['by']}: {result['seen']}"
        seconds = time.monotonic() - start
        print(f"{number:3}/{len(mutants)} {seconds:5.0f} s  {mutant.name}: {outcome}", flush=True)
    return survivors


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every mutant was caught that can be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-dir", type=Path, required=True)
    parser.add_argument("--only", metavar="TEXT", help="mutants with this in their name")
    parser.add_argument("--table", action="store_true", help="print the stored results and end")
    options = parser.parse_args(arguments)
    mutants = MUTANTS
    work = options.build_dir.resolve() / "mutants"
    work.mkdir(parents=True, exist_ok=True)
    stored = work / "results.json"
    if options.table:
        results = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else {}
        print(table(mutants, results))
        return 0
    if options.only:
        mutants = [m for m in mutants if options.only in m.name]
    ninja = Path(sys.executable).parent / "ninja"
    build = Build(options.build_dir.resolve(), str(ninja) if ninja.is_file() else "ninja")
    survivors = run_all(mutants, build, work, stored)
    print(f"{len(mutants)} mutants, {survivors} not caught")
    return int(survivors != 0)


if __name__ == "__main__":
    raise SystemExit(main())
