# SPDX-License-Identifier: Apache-2.0
"""The files of a source tree that the checks look at."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tracked_files(root: Path, *suffixes: str) -> Iterator[Path]:
    """Yields the files of a tree, those that git ignores left out.

    Args:
        root: Top of the tree; a tree that is not a git checkout gives all its files.
        *suffixes: Ends of file names, e.g. ".cpp"; none means every file.

    Yields:
        Paths below root, sorted.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=False)
    if listed.returncode == 0 and (root / ".git").exists():
        paths = [root / name for name in listed.stdout.decode().split("\0") if name]
    else:
        paths = list(root.rglob("*"))
    for path in sorted(set(paths)):
        if path.is_file() and (not suffixes or path.name.endswith(suffixes)):
            yield path


def replace_text(file: Path, text: str) -> None:
    """Writes a file anew, so that a run that is killed leaves the old one or the new one."""
    written = file.with_name(f"{file.name}.new")
    written.write_text(text, encoding="utf-8")
    written.replace(file)


def report(problems: list[str]) -> int:
    """Prints the problems, one a line; returns the exit status of a check."""
    for problem in problems:
        print(problem)
    return int(bool(problems))
