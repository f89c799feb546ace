# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy over the compiled .cpp files, several at a time, and only over what changed.

A file that passed is not looked at again until it, any of our headers, the configuration or the
tool changes; parsing torch's headers is what costs the time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import suite_parts
from lint import tool
from tracked_files import ROOT, tracked_files

# Not tests: what Catch2's macros expand to fails many checks.
CHECKED = ("src", "python", "examples", "benchmarks")

# What is gcc's own: its precompiled headers, which would also hide an include that a source lacks,
# and how it manages its memory.
GCC_ONLY = re.compile(r" -Winvalid-pch| -include \S*/cmake_pch\.hxx| --param=\S+")


# What CMake writes for sources that are compiled together.
UNITY_FILE = re.compile(r"/Unity/unity_\w+\.cxx$")
INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def compile_commands(build_dir: Path) -> list[dict[str, str]]:
    """Returns the build's compile commands as clang can read them, one for each source.

    A source that is compiled together with others gets the command of them all: by itself it must
    compile too, which shows an include that it lacks.
    """
    text = (build_dir / "compile_commands.json").read_text(encoding="utf-8")
    # A file once, as its first target compiles it: kernels are emulated in several flavours.
    commands: dict[str, dict[str, str]] = {}
    for entry in json.loads(text):
        file, command = entry["file"], GCC_ONLY.sub("", entry["command"])
        together = UNITY_FILE.search(file) is not None
        members = INCLUDED.findall(Path(file).read_text(encoding="utf-8")) if together else [file]
        for member in members:
            own = {**entry, "file": member, "command": command.replace(file, member)}
            commands.setdefault(str(Path(member).resolve()), own)
    return list(commands.values())


def sources(commands: list[dict[str, str]]) -> list[Path]:
    """Returns our .cpp files that the build compiles."""
    own = set(tracked_files(ROOT, ".cpp"))
    found = {Path(entry["file"]).resolve() for entry in commands}
    return sorted(path for path in found & own if path.relative_to(ROOT).parts[0] in CHECKED)


def write_database(build_dir: Path, commands: list[dict[str, str]]) -> Path:
    """Writes compile commands for clang-tidy; returns their folder."""
    folder = build_dir / "clang_tidy"
    folder.mkdir(exist_ok=True)
    (folder / "compile_commands.json").write_text(json.dumps(commands, indent=1), encoding="utf-8")
    return folder


def common_digest(clang_tidy: str) -> bytes:
    """Returns a digest of all that every file's result depends on."""
    digest = hashlib.sha256(subprocess.check_output([clang_tidy, "--version"]))
    for path in (ROOT / ".clang-tidy", *tracked_files(ROOT, ".h", ".inc", ".in")):
        digest.update(path.read_bytes())
    return digest.digest()


def check(clang_tidy: str, database: Path, path: Path) -> str:
    """Returns clang-tidy's findings in one file; empty if there are none."""
    # gcc's own warning options mean nothing to clang, and gcc's library uses parts of itself that
    # clang takes for deprecated; the build reports deprecated functions in our code.
    flags = ("-Wno-unknown-warning-option", "-Wno-deprecated-declarations", "-fno-openmp")
    extra = [f"--extra-arg={flag}" for flag in flags]
    command = [clang_tidy, "-p", str(database), *extra, "--quiet", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else result.stdout + result.stderr


def check_until(end: float, clang_tidy: str, database: Path, path: Path) -> str | None:
    """Returns clang-tidy's findings in one file, None if ``time.monotonic()`` is past the end."""
    return check(clang_tidy, database, path) if time.monotonic() < end else None


def main() -> int:
    """Returns 0 if no file has findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-dir", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no file after these")
    options = parser.parse_args()
    clang_tidy = tool("clang-tidy")
    common = common_digest(clang_tidy)
    cache_file = options.build_dir / "clang_tidy_passed.json"
    passed = set(json.loads(cache_file.read_text()) if cache_file.is_file() else [])
    commands = compile_commands(options.build_dir)
    digests = {
        path: hashlib.sha256(common + str(path).encode() + path.read_bytes()).hexdigest()
        for path in sources(commands)
    }
    todo = [path for path, digest in digests.items() if digest not in passed]
    changed = {ROOT / file for file in suite_parts.changed() or ()}
    todo.sort(key=lambda path: path not in changed)
    database = write_database(options.build_dir, commands)
    end = time.monotonic() + 60 * options.minutes
    with ThreadPoolExecutor(options.jobs) as pool:
        findings = list(pool.map(lambda path: check_until(end, clang_tidy, database, path), todo))
    bad = {path: finding for path, finding in zip(todo, findings, strict=True) if finding != ""}
    cache_file.write_text(json.dumps([d for path, d in digests.items() if path not in bad]))
    found = [finding for finding in bad.values() if finding]
    if len(found) < len(bad):
        print(f"left out, for want of time: {len(bad) - len(found)} of {len(todo)} files")
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
