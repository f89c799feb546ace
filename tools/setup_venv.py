# SPDX-License-Identifier: Apache-2.0
"""Puts the pinned packages, and fastamp itself, into the virtual environment that runs this."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cmake_build import ROOT, has_gpu

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

DEMO_EXTRAS = ("build", "demo")
EXTRAS = (*DEMO_EXTRAS, "test", "bench", "export", "thirdparty", "docs", "lint")
# torchvision is pinned for this torch; for another one pip finds the one that fits.
PINNED_TORCH = "torch==2.11.0"


def pip(*arguments: str) -> None:
    """Runs pip of this interpreter."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def read_pyproject() -> dict[str, Any]:
    """Returns pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def install_packages(torch: str, extras: Sequence[str]) -> None:
    """Installs torch and the packages of our extras, at the versions pyproject.toml pins."""
    optional = read_pyproject()["project"]["optional-dependencies"]
    pinned = sorted({requirement for extra in extras for requirement in optional[extra]})
    if torch != PINNED_TORCH:
        pinned = ["torchvision" if r.startswith("torchvision==") else r for r in pinned]
    size = "" if has_package("torch") else ": 3 GB the first time"
    print(f"installing {torch} and {len(pinned)} more packages{size}", flush=True)
    pip("install", "-q", torch, *pinned)
    if has_gpu():
        install_toolkit()


def has_package(name: str) -> bool:
    """Returns whether pip has installed the package here."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def install_toolkit() -> None:
    """Installs a CUDA compiler that fits torch, unless there is one."""
    if has_toolkit():
        return
    # All four parts, and of the version that torch brought: pip would take newer ones, which do
    # not work together.
    toolkit = f"cuda-toolkit[nvcc,crt,nvvm,cccl]=={version('cuda-toolkit')}"
    print(f"there is no CUDA toolkit that fits torch: installing {toolkit}", flush=True)
    pip("install", "-q", toolkit)


def has_toolkit() -> bool:
    """Returns whether CMake would find a CUDA toolkit that fits torch, or torch wants none."""
    if not has_package("cuda-toolkit"):
        return True  # a torch without CUDA, or one that brings its own in another way
    script = ROOT / "cmake" / "print_toolkit.cmake"
    cmake = Path(sys.executable).parent / "cmake"
    command = [str(cmake), f"-DPython3_EXECUTABLE={sys.executable}", "-P", str(script)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def install_editable(stamp: Path, demo: bool) -> None:
    """Runs ``pip install -e`` once for each state of the packaging files."""
    digest = hashlib.sha256()
    for name in ("setup.py", "pyproject.toml", "VERSION"):
        digest.update((ROOT / name).read_bytes())
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == digest.hexdigest():
        return
    # The same build folder, with the same options: what is built already is not built again.
    os.environ["FASTAMP_BUILD_DEMO" if demo else "FASTAMP_BUILD_TESTS"] = "1"
    pip("install", "-q", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    stamp.write_text(digest.hexdigest(), encoding="utf-8")


def main() -> None:
    """Runs one of the steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    packages = steps.add_parser("packages", help="torch and our tools")
    packages.add_argument("--torch", required=True, help="requirement, e.g. torch==2.11.0")
    packages.add_argument("--demo", action="store_true", help="only what the demo needs")
    toolkit = steps.add_parser(
        "toolkit", help="a CUDA compiler, if there is a GPU and none that fits"
    )
    toolkit.add_argument("--without-gpu", action="store_true", help="even if there is no GPU")
    editable = steps.add_parser("editable", help="fastamp itself")
    editable.add_argument("--stamp", type=Path, required=True)
    editable.add_argument("--demo", action="store_true", help="as cmake_build.py --demo")
    options = parser.parse_args()
    if options.step == "packages":
        install_packages(options.torch, DEMO_EXTRAS if options.demo else EXTRAS)
    elif options.step == "toolkit":
        if options.without_gpu or has_gpu():
            install_toolkit()
    else:
        install_editable(options.stamp, options.demo)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"fastamp: set-up failed: {error}") from None
