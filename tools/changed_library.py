# SPDX-License-Identifier: Apache-2.0
"""The native libraries with some sources changed: compiled beside a build folder, which is read.

Used by the tools that break host code.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = {"fastamp": "libfastamp.so.0.1", "fastamp_cuda": "libfastamp_cuda.so.0.1"}


class CannotBeBuiltError(RuntimeError):
    """The compiler or the linker refused; the text is what it said."""


@dataclass(frozen=True)
class _Compilation:
    """A command, where in it the object is, and the source that it is to compile instead."""

    words: list[str]
    place: int
    source: Path


class LibraryBuild:
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

    def library(
        self,
        changed: Mapping[Path, Path],
        work: Path,
        options: Sequence[str] = (),
        jobs: int = 1,
    ) -> Path:
        """Makes the library that some sources are in, all of one; returns it.

        Args:
            changed: What is compiled instead of each of these sources, alone or in a unity source.
            work: Where the objects and the library go.
            options: More of the compiler's.
            jobs: How many compilers run at once.

        Raises:
            CannotBeBuiltError: It does not compile, or no library has one of the sources.
        """
        for target in LIBRARIES:
            compilations = self._compilations(target, changed, work)
            if compilations:
                break
        else:
            raise CannotBeBuiltError(f"no library has {next(iter(changed))}")
        name = LIBRARIES[target]

        objects = {
            step.words[step.place]: str(work / f"{step.source.stem}.o") for step in compilations
        }

        def compile_one(step: _Compilation) -> str:
            words = [*step.words, *options]
            words[words.index("-c") + 1] = str(step.source)
            words[step.place] = objects[words[step.place]]
            return self._errors_of(words)

        with ThreadPoolExecutor(jobs) as pool:
            errors = "".join(pool.map(compile_one, compilations))
        if errors:
            raise CannotBeBuiltError(errors)
        link = next(w for w in self.commands[target] if "-o" in w and w[w.index("-o") + 1] == name)
        link = [objects.get(word, word) for word in link]
        link[link.index("-o") + 1] = str(work / name)
        if errors := self._errors_of(link):
            raise CannotBeBuiltError(errors)
        return work / name

    def _compilations(
        self, target: str, changed: Mapping[Path, Path], work: Path
    ) -> list[_Compilation]:
        """What compiles changed sources for a target; writes the unity sources that name them."""
        found = []
        for words in self.commands[target]:
            if "-c" not in words:
                continue
            source = Path(words[words.index("-c") + 1])
            instead = changed.get(source)
            if source.parent.name == "Unity":
                before = text = source.read_text(encoding="utf-8")
                for file, other in changed.items():
                    text = text.replace(f'#include "{file}"', f'#include "{other}"')
                if text != before:
                    instead = work / source.name
                    instead.write_text(text, encoding="utf-8")
            if instead is not None:
                found.append(_Compilation(words, words.index("-o") + 1, instead))
        return found

    def _errors_of(self, words: list[str]) -> str:
        """Runs a command; returns what it wrote if it failed."""
        result = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=False)
        return result.stderr or " ".join(words) if result.returncode != 0 else ""
