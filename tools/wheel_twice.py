# SPDX-License-Identifier: Apache-2.0
"""Builds the last commit's wheel twice, in clean checkouts of two folders: are the bytes equal?

wheel_twice.py [--cuda OFF]: for the torch and the Python that run this, without ccache. Names the
files of the wheels that differ; diffoscope, where it is installed, says in what.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from tracked_files import ROOT

WORK = ROOT / "build" / "twice"
FOLDERS = ("one", "one-more/elsewhere")


def build_in(folder: Path, cuda: str, jobs: int) -> Path:
    """Returns the wheel of the last commit, built from a checkout in a folder that is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    torch = version("torch").partition("+")[0]
    command = [sys.executable, "tools/build_wheel.py", f"--torch={torch}", f"--cuda={cuda}"]
    unset = ("FASTAMP_BUILD_DIR", "PYTHONPATH", "SOURCE_DATE_EPOCH")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["CCACHE_DISABLE"] = "1"  # What an earlier build has made would prove nothing.
    subprocess.run([*command, f"--jobs={jobs}"], cwd=folder, env=environment, check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def differences(one: Path, other: Path) -> Iterator[str]:
    """Yields in what two wheels differ; nothing if they are the same bytes."""
    if one.read_bytes() == other.read_bytes():
        return
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        entries = [{each.filename: each for each in wheel.infolist()} for wheel in (first, second)]
        for name in sorted(entries[0].keys() ^ entries[1].keys()):
            yield f"{name}: in one of them alone"
        for name in sorted(entries[0].keys() & entries[1].keys()):
            if first.read(name) != second.read(name):
                yield f"{name}: other bytes"
            elif entries[0][name].date_time != entries[1][name].date_time:
                yield f"{name}: another time"
        if list(entries[0]) != list(entries[1]):
            yield "files in another order"
    yield f"{one.name}: other bytes"
    if diffoscope := shutil.which("diffoscope"):
        done = subprocess.run([diffoscope, one, other], capture_output=True, text=True, check=False)
        yield done.stdout


def main() -> int:
    """Returns 0 if the wheels are the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuda", choices=("AUTO", "ON", "OFF"), default="OFF")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    one, other = (build_in(WORK / name, options.cuda, options.jobs) for name in FOLDERS)
    found = list(differences(one, other))
    digest = hashlib.sha256(one.read_bytes()).hexdigest()
    print("\n".join(found) if found else f"{one.name}: twice the same bytes, SHA-256 {digest}")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
