# SPDX-License-Identifier: Apache-2.0
"""Runs every formatter, linter and type check; goes on after a failure and names all at the end."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tracked_files import ROOT, tracked_files

CPP = (".h", ".cpp", ".cu", ".cuh")

#: Checks that are left out, with a message, where their tool is not installed.
OPTIONAL = ("doxygen",)


def tool(name: str) -> str:
    """Returns a tool's path, the one beside this interpreter first; its bare name if missing."""
    beside = Path(sys.executable).parent
    path = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which(name, path=path) or name


def names(*suffixes: str) -> list[str]:
    """Returns the tracked files with these ends, relative to the root."""
    return [str(path.relative_to(ROOT)) for path in tracked_files(ROOT, *suffixes)]


def commands(build_dir: Path, jobs: int, minutes: float | None) -> dict[str, list[str]]:
    """Returns what to run, by the name to report it under."""
    python = sys.executable
    tidy = ["tools/run_clang_tidy.py", "--build-dir", str(build_dir), "--jobs", str(jobs)]
    if minutes is not None:
        tidy += ["--minutes", str(minutes)]
    return {
        "ruff check": [tool("ruff"), "check", "."],
        "ruff format": [tool("ruff"), "format", "--check", "."],
        "mypy": [python, "-m", "mypy"],
        "codespell": [tool("codespell"), *names()],
        "shellcheck": [tool("shellcheck"), *names(".sh"), ".ci/run"],
        "gersemi": [tool("gersemi"), "--check", *names(".cmake", "CMakeLists.txt")],
        "includes": [python, "tools/check_includes.py"],
        "sizes": [python, "tools/check_sizes.py"],
        "ascii": [python, "tools/check_ascii.py"],
        "homes": [python, "tools/check_homes.py"],
        "copies": [python, "tools/check_copies.py"],
        "licenses": [python, "tools/check_licenses.py"],
        "public-api": [python, "tools/public_api.py"],
        "clang-format": [tool("clang-format"), "--dry-run", "-Werror", *names(*CPP)],
        "doxygen": [tool("doxygen"), "docs/Doxyfile"],
        "clang-tidy": [python, *tidy],
    }


def run(name: str, command: list[str]) -> bool:
    """Runs one check; its output is shown only if it fails."""
    start = time.monotonic()
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        passed, output = result.returncode == 0, result.stdout + result.stderr
    except FileNotFoundError:
        passed, output = False, f"{command[0]} is not installed; CONTRIBUTING.md says how to get it"
        if name in OPTIONAL:
            print(f"{name:14}left out: {output}", flush=True)
            return True
    verdict = "ok" if passed else "FAILED"
    print(f"{name:14}{verdict:8}{time.monotonic() - start:6.1f} s", flush=True)
    notes = [line for line in output.splitlines() if line.startswith("left out")]
    shown = "\n".join(notes) if passed else output
    if shown:
        print(shown, flush=True)
    return passed


def main() -> int:
    """Returns 0 if every check passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-dir", type=Path, required=True, help="for clang-tidy")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, help="after which clang-tidy begins no file")
    parser.add_argument("--only", metavar="NAME", action="append", help="this check, not all")
    options = parser.parse_args()
    checks = commands(options.build_dir, options.jobs, options.minutes)
    if options.only is not None:
        unknown = sorted(set(options.only) - set(checks))
        if unknown:
            parser.error(f"--only: expected one of {', '.join(checks)}, got {', '.join(unknown)}")
        checks = {name: checks[name] for name in options.only}
    failed = [name for name, command in checks.items() if not run(name, command)]
    print(f"lint: {len(checks) - len(failed)} of {len(checks)} checks passed", end="")
    print(f"; failed: {', '.join(failed)}" if failed else "")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
