# SPDX-License-Identifier: Apache-2.0
"""Checks that no copy between devices is made without waiting, unless it is clear where it goes.

A copy to the CPU that does not wait is read before it has arrived. src/core/device_copy.h and
fastamp/_util/tensors.py make copies that wait where they must; other code calls them. A line that
has to ask for it itself says why: "// towards ..." or "# towards ...".
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tracked_files import ROOT, report, tracked_files

HOMES = {"src/core/device_copy.h", "python/fastamp/_util/tensors.py"}
FOLDERS = ("src", "python", "include")
SOURCES = (".h", ".cpp", ".cu", ".cuh", ".py")
REASON = re.compile(r"(//|#)\s*towards \S+")
NON_BLOCKING = re.compile(
    # By name, but for false; and as the third argument of to(device, dtype, ...).
    r"non_blocking\s*=(\*/)?(?!\*/)(?!\s*(false|False)\b)"
    r"|\bto\([^;]*?,\s*[^,;]*,\s*true\b"
)


def line_problem(line: str) -> str | None:
    """Returns what is wrong with a line, or None."""
    if NON_BLOCKING.search(line) and not REASON.search(line):
        return "a copy that may not wait: use on_device(), or say where it goes, // towards ..."
    return None


def check(root: Path) -> list[str]:
    """Returns one line, "path:line: problem", for each such copy below root."""
    found = []
    for path in tracked_files(root, *SOURCES):
        relative = path.relative_to(root)
        if relative.parts[0] not in FOLDERS or str(relative) in HOMES:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            problem = line_problem(line)
            if problem:
                found.append(f"{relative}:{number}: {problem}")
    return found


if __name__ == "__main__":
    sys.exit(report(check(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)))
