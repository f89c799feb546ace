# SPDX-License-Identifier: Apache-2.0
"""Breaks host code in places drawn at random, and sees whether a test notices.

The Python scaler, src/scaler and the caches of src/autocast. All drawn breaks (mutants) are in one
package and one library, in build/mutants, where a number turns one of them on; so a mutant costs no
more than the tests that reach it (tools/mutant_tests.py), the nearest first, until one fails.
A run can be stopped and taken up again; what was noticed is not run again until its file changes.
Results are in tests/mutants_at_random.jsonl; --table prints what no test noticed. docs/testing.md
says why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpp_mutations
import mutant_results
import python_mutations
from changed_library import LIBRARIES, CannotBeBuiltError, LibraryBuild
from mutant_control import Control
from mutant_runs import ninja
from mutations import Mutation, switched
from tracked_files import ROOT

PACKAGE = ROOT / "python" / "fastamp"
PYTHON_FILES = sorted((PACKAGE / "_scaler").glob("*.py"))
CACHES = (
    "cast_cache",
    "cast_node",
    "cast_plans",
    "cast_source",
    "cast_together",
    "data_cast",
    "kept_casts",
    "recent_casts",
    "tensor_identity",
    "thread_cache",
    "weight_aliases",
    "weight_requests",
)
CPP_FILES = [
    *sorted((ROOT / "src" / "scaler").glob("*.cpp")),
    *(ROOT / "src" / "autocast" / f"{name}.cpp" for name in CACHES),
]
#: What no test has to notice.
ALIVE = ("survives", "not reached")


@dataclass(frozen=True)
class Mutant:
    """A drawn change.

    Attributes:
        number: Turns it on; from 1.
        file: Below the top of the tree.
        mutation: The change.
        key: What a result is valid for.
    """

    number: int
    file: str
    mutation: Mutation
    key: str

    @property
    def name(self) -> str:
        """File, line and change on one line."""
        old, new = (" ".join(text.split()) for text in (self.mutation.old, self.mutation.new))
        old = old if len(old) <= 100 else f"{old[:60]} ... {old[-35:]}"
        new = new if len(new) <= 100 else f"{new[:60]} ... {new[-35:]}"
        return f"{self.file}:{self.mutation.line}: {old} -> {new or 'nothing'}"


def drawn(
    files: Sequence[Path],
    find: Callable[[str], list[Mutation]],
    count: int | None,
    seed: int,
    first: int = 1,
) -> list[Mutant]:
    """Draws changes of files.

    Args:
        files: To change.
        find: Returns all changes of a source.
        count: How many, if there are as many; ``None``: all.
        seed: Of the draw.
        first: The number of the first.
    """
    drawn_by: list[tuple[bytes, str, Mutation, str]] = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        name = str(file.relative_to(ROOT))
        seen: Counter[tuple[str, str]] = Counter()
        for change in find(text):
            seen[change.old, change.new] += 1
            place = (seed, name, change.old, change.new, seen[change.old, change.new])
            key = _digest(f"{text}\n{change.begin} {change.end} {change.new}").hex()[:16]
            drawn_by.append((_digest(repr(place)), name, change, key))
    # By what a change is: an edit elsewhere leaves the others drawn.
    chosen = sorted(drawn_by, key=lambda one: one[0])[:count]
    return [Mutant(number, *one[1:]) for number, one in enumerate(chosen, first)]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def switched_texts(mutants: Sequence[Mutant]) -> dict[str, str]:
    """The switched source of each file that is changed."""
    by_file: dict[str, dict[int, Mutation]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.file, {})[mutant.number] = mutant.mutation
    return {
        file: switched((ROOT / file).read_text(encoding="utf-8"), changes)
        for file, changes in by_file.items()
    }


def refused(errors: str, mutants: Sequence[Mutant]) -> list[Mutant]:
    """The mutants on lines that a compiler complains about."""
    lines = set(re.findall(rf"{re.escape(str(ROOT))}/(\S+?):(\d+)", errors))
    return [
        mutant
        for mutant in mutants
        if any(
            (mutant.file, str(line)) in lines
            for line in range(mutant.mutation.line, mutant.mutation.last + 1)
        )
    ]


def make_library(
    build_dir: Path, mutants: Sequence[Mutant], folder: Path, jobs: int
) -> list[Mutant]:
    """Compiles the switched C++ sources into a folder; returns the mutants that compile.

    Raises:
        CannotBeBuiltError: It does not compile, and not because of a mutant.
    """
    build = LibraryBuild(build_dir, ninja())
    header = folder / "fastamp_mutants.h"
    header.write_text(cpp_mutations.switch_header(str(folder / "control")), encoding="utf-8")
    compiling = list(mutants)
    while True:
        changed = {}
        for file, text in switched_texts(compiling).items():
            copy = folder / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = cpp_mutations.with_switch(text, str(header), str(ROOT / file))
            copy.write_text(text, encoding="utf-8")
            changed[ROOT / file] = copy
        try:
            build.library(changed, folder, ["-w", "-O1"], jobs)
        except CannotBeBuiltError as error:
            (folder / "errors.log").write_text(str(error), encoding="utf-8")
            if not (out := refused(str(error), compiling)):
                raise
            compiling = [mutant for mutant in compiling if mutant not in out]
            print(f"{len(out)} do not compile, {len(compiling)} left", flush=True)
        else:
            return compiling


def make_package(mutants: Sequence[Mutant], folder: Path) -> None:
    """Copies the package into a folder, with the switched Python sources and the library there."""
    package = folder / "python"
    shutil.rmtree(package, ignore_errors=True)
    left_out = shutil.ignore_patterns("__pycache__", "include")
    shutil.copytree(PACKAGE, package / "fastamp", ignore=left_out)
    for file, text in switched_texts(mutants).items():
        (folder / file).write_text(python_mutations.with_switch(text), encoding="utf-8")
    switch = python_mutations.switch_module(str(folder / "control"))
    (package / "fastamp_mutants.py").write_text(switch, encoding="utf-8")
    library = folder / LIBRARIES["fastamp"]
    if library.is_file():
        shutil.copy(library, package / "fastamp" / "lib" / library.name)


def prepare(build_dir: Path, folder: Path, mutants: Sequence[Mutant], jobs: int) -> dict[str, Any]:
    """Makes the package, and the library if it is not there; returns what tests have to know."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = folder / "plan.json"
    plan: dict[str, Any] = json.loads(stored.read_text("utf-8")) if stored.is_file() else {}
    state = hashlib.sha256("".join(m.key for m in mutants).encode()).hexdigest()
    Control(folder / "control", mutants[-1].number)
    if plan.get("state") != state:
        stored.unlink(missing_ok=True)
        cpp = [mutant for mutant in mutants if mutant.file.endswith(".cpp")]
        compiling = make_library(build_dir, cpp, folder, jobs) if cpp else []
        python = [mutant for mutant in mutants if mutant.file.endswith(".py")]
        known = [
            {"number": m.number, "file": m.file, "key": m.key, "name": m.name}
            for m in (*python, *compiling)
        ]
        plan = {"state": state, "build_dir": str(build_dir), "mutants": known}
        plan["not compiled"] = [m.name for m in cpp if m not in compiling]
        stored.write_text(json.dumps(plan, indent=1), encoding="utf-8")
    make_package([m for m in mutants if m.file.endswith(".py")], folder)
    return plan


def _is_decided(result: Mapping[str, str] | None) -> bool:
    """Whether all tests have been run that a mutant needs."""
    return result is not None and result["is"] != "open"


def summary(plan: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns how many were noticed, and a line for each that was not."""
    lines = []
    for language, end in (("C++", ".cpp"), ("Python", ".py")):
        mutants = [mutant for mutant in plan["mutants"] if mutant["file"].endswith(end)]
        known = [mutant for mutant in mutants if _is_decided(results.get(mutant["key"]))]
        verdicts = [results[mutant["key"]]["is"] for mutant in known]
        for mutant, verdict in zip(known, verdicts, strict=True):
            if verdict in ALIVE:
                lines.append(f"- {verdict}: {mutant['name']}")
        counts = {word: verdicts.count(word) for word in ("killed", "hangs", *ALIVE)}
        told = ", ".join(f"{count} {word}" for word, count in counts.items())
        lines.append(f"{language}: {len(known)} of {len(mutants)} run: {told}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if at least 90 % of those that were run are noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-dir", type=Path, required=True)
    parser.add_argument("--count", type=int, default=160, help="breaks drawn of each language")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="of tests for each mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once")
    parser.add_argument("--only", default="", metavar="TEXT", help="files with this in their path")
    parser.add_argument("--table", action="store_true", help="print the stored results and end")
    options = parser.parse_args(arguments)
    build_dir = options.build_dir.resolve()
    files = [
        [file for file in every if options.only in str(file.relative_to(ROOT))]
        for every in (PYTHON_FILES, CPP_FILES)
    ]
    mutants = drawn(files[0], python_mutations.mutations, options.count, options.seed)
    start = len(mutants) + 1
    mutants += drawn(files[1], cpp_mutations.mutations, options.count, options.seed, start)
    # Found again by all runs of the same draw. Results are of all draws.
    draw = f"{options.count}-{options.seed}{options.only and '-'}{options.only.replace('/', '-')}"
    folder = build_dir / "mutants" / "random" / draw
    if not options.table:
        every = drawn(PYTHON_FILES, python_mutations.mutations, None, 0)
        every += drawn(CPP_FILES, cpp_mutations.mutations, None, 0)
        mutant_results.drop_others({mutant.key for mutant in every})
        prepare(build_dir, folder, mutants, options.jobs)
        paths = [str(folder / "python"), os.environ.get("PYTHONPATH", "")]
        libraries = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        }
        tests = [sys.executable, str(ROOT / "tools" / "mutant_tests.py"), str(folder)]
        subprocess.run([*tests, str(options.seconds)], cwd=ROOT, env=environment, check=True)
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    results = mutant_results.read()
    print(summary(plan, results))
    known = [results[m["key"]] for m in plan["mutants"] if _is_decided(results.get(m["key"]))]
    return int(10 * sum(result["is"] in ALIVE for result in known) > len(known))


if __name__ == "__main__":
    raise SystemExit(main())
