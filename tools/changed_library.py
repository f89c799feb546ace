# SPDX-License-Identifier: Apache-2.0
"""The native libraries with some sources changed: compiled beside a build folder, which is read.

Used by the tools that break host code.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = {"fastamp": "libfastamp.so.0.1", "fastamp_cuda": "libfastamp_cuda.so.0.1"}


class CannotBeBuiltError(RuntimeError):
    """The compiler or the linker refused; the text is what it said."""


def _without_optimization(words: Sequence[str]) -> list[str]:
    """A compiler's command that is done sooner: for one architecture if it is nvcc's.

    Nothing runs its device code: the simulated device has the emulator's.
    """
    architectures = [word for word in words if word.startswith("--generate-code=")]
    kept = ["-O0" if word == "-O3" else word for word in words if word not in architectures[1:]]
    kept = kept[1:] if Path(kept[0]).name == "ccache" else kept
    if "-MD" in kept:  # what ninja reads of a file's headers
        first = kept.index("-MD")
        del kept[first : kept.index("-MF") + 2]
    return [*kept, "-Xcicc", "-O0", "-Xptxas", "-O0"] if architectures else kept


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
        optimized: bool = True,
    ) -> Path:
        """Makes the library that some sources are in, all of one; returns it.

        Args:
            changed: What is compiled instead of each of these sources, alone or in a unity source.
            work: Where the objects and the library go.
            options: More of the compiler's.
            jobs: How many compilers run at once.
            optimized: As the build folder's library is.

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
            words = list(step.words)
            words[words.index("-c") + 1] = str(step.source)
            words[step.place] = objects[words[step.place]]
            if not optimized:
                words = self._with_own_headers(_without_optimization(words), target, work)
            return self._errors_of([*words, *options])

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
        """Returns what compiles changed sources; writes the unity sources that name them."""
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
            make = _without_optimization(
                next(w for w in self.commands[target] if "c++-header" in w)
            )
            make[make.index("-o") + 1] = str(compiled)
            if errors := self._errors_of(make):
                raise CannotBeBuiltError(errors)
        return [str(own) if word == header else word for word in words]

    def _errors_of(self, words: list[str]) -> str:
        """Runs a command; returns what it wrote if it failed."""
        result = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=False)
        return result.stderr or " ".join(words) if result.returncode != 0 else ""
