# SPDX-License-Identifier: Apache-2.0
"""Builds fastamp against another torch, in a virtual environment of its own, and tests it there.

What runs is what `make test` runs. Before that the states of optimizers and scalers that this torch
writes are left in build/compat/states, where the tests of every torch that comes after read them,
bit for bit. The CUDA part is built where there is a CUDA toolkit of torch's
own version; --cuda ON insists, and installs one from Python packages if torch came with their
runtime (CUDA 13 on).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

from cmake_build import ROOT
from setup_venv import read_pyproject

EXTRAS = ("build", "demo", "test")


def run(python: Path, *arguments: str, check: bool = True, **environment: str) -> int:
    """Runs an interpreter on this checkout, in our environment and with what is given.

    Returns:
        The exit status.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), *arguments]
    return subprocess.run(command, cwd=ROOT, env=inherited | environment, check=check).returncode


def make_environment(folder: Path, torch: str, extras: Sequence[str] = EXTRAS) -> Path:
    """Makes the virtual environment once for each torch and state of the pinned packages.

    Args:
        folder: Where it is made.
        torch: Version, e.g. "2.15.0".
        extras: Which of our optional dependencies it gets.

    Returns:
        Its interpreter.
    """
    python = folder / "bin" / "python"
    optional = read_pyproject()["project"]["optional-dependencies"]
    wanted = [f"torch=={torch}", *(name for extra in extras for name in optional[extra])]
    stamp = folder / "fastamp_packages.txt"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == "\n".join(wanted):
        return python
    print(f"installing torch {torch} into {folder.relative_to(ROOT)}: 3 GB", flush=True)
    venv.create(folder, with_pip=True)
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *wanted)
    stamp.write_text("\n".join(wanted), encoding="utf-8")
    return python


def prepare_cuda(python: Path, wanted: str) -> str:
    """Provides a compiler for the CUDA part.

    Returns:
        The option for CMake.
    """
    if wanted != "OFF":
        command = (str(ROOT / "tools" / "setup_venv.py"), "toolkit")
        run(python, *command, *(("--without-gpu",) if wanted == "ON" else ()))
    return f"-DFASTAMP_CUDA={wanted}"


def describe_build(python: Path, torch: str) -> str:
    """Returns what was built, in a line."""
    locate = (
        "import importlib.util as u; print(u.find_spec('fastamp').submodule_search_locations[0])"
    )
    package = subprocess.check_output([str(python), "-I", "-c", locate], text=True)
    info = json.loads((Path(package.strip()) / "build_info.json").read_text(encoding="utf-8"))
    own, torchs = info["cuda_version"], info["torch_cuda_version"]
    if own:
        return f"torch {torch}: built with CUDA {own}"
    reason = f"torch's CUDA is {torchs}" if torchs else "torch has none"
    return f"torch {torch}: built without CUDA ({reason}; FASTAMP_CUDA=ON insists)"


def main() -> int:
    """Returns 0 if the build succeeded and all tests passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, help="version, e.g. 2.15.0 or torch==2.15.0")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cuda", choices=("AUTO", "ON", "OFF"), default="AUTO")
    parser.add_argument("--only", default="", help="only tests with this in their names")
    options = parser.parse_args()
    version = options.torch.removeprefix("torch==")
    folder = ROOT / "build" / "compat" / version
    python = make_environment(folder / "venv", version)
    build = folder / "make"
    cmake_args = f"{prepare_cuda(python, options.cuda)} {os.environ.get('CMAKE_ARGS', '')}"
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "-q", "--force-reinstall")
    run(
        python,
        *(*pip, "--no-deps", "--no-build-isolation", str(ROOT)),
        FASTAMP_BUILD_DIR=str(build),
        FASTAMP_BUILD_TESTS="1",
        MAX_JOBS=str(options.jobs),
        CMAKE_ARGS=cmake_args,
    )
    built = describe_build(python, version)
    print(built, flush=True)
    states = ROOT / "build" / "compat" / "states"
    helpers = str(ROOT / "tests" / "python")
    run(python, "-m", "support.other_torch", str(states), PYTHONPATH=helpers)
    isa = (str(ROOT / "tools" / "with_cpu_isa.py"), "--cache", str(ROOT / "build" / "cpu_isa.json"))
    tests = ("tools/run_tests.py", "--build-dir", str(build), "--logs", str(folder / "tests"))
    only = ("--only", options.only) if options.only else ()
    status = run(
        python,
        *(*isa, "--", str(python), *tests, *only),
        check=False,
        FASTAMP_BUILD_DIR=str(build),
        FASTAMP_STATES=str(states),
    )
    print(f"{built}; {'failed' if status else 'passed'}", flush=True)
    return int(bool(status))


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"fastamp: compat failed: {error}") from None
