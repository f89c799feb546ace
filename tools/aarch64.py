# SPDX-License-Identifier: Apache-2.0
"""Builds fastamp for 64-bit Arm with a cross compiler, and tests it under qemu.

Needs Debian's cross compiler and qemu (tools/setup_system.sh). A Python for aarch64 comes from the
same Debian, torch from its wheel; all of it lies in build/pythons and build/aarch64. Every C++ test
of the product is run, and of the Python tests those in SMOKE: an emulated program takes ten to
thirty times as long, and its times say nothing. With --cuda ON the code for CUDA is compiled by
this machine's nvcc, which comes from Python packages; nothing runs it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

import debian_python
from cmake_build import ROOT, Build
from compat import run
from patience import patience
from run_tests import CTEST_SECONDS, PYTEST_OPTIONS, ctest_command
from setup_venv import PINNED_TORCH, read_pyproject

WORK = ROOT / "build" / "aarch64"
SITE = WORK / "site"  # what pip would install, and fastamp
BUILD_DIR = WORK / "make"
PYTHON = "3.11"
# Of the suite whose cross compiler this is: programs want a C library that is not older.
DEBIAN = debian_python.Debian(
    suite="bookworm", architecture="arm64", emulator="qemu-aarch64", more=("libstdc++6",)
)
PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{n}_aarch64" for n in range(17, 29)))
SLOWNESS = 30  # of an emulated program, at most
SMOKE = (
    "tests/python/autocast/test_cast_cache.py",
    "tests/python/autocast/test_region.py",
    "tests/python/autocast/test_training_bits.py",
    "tests/python/ops/test_fused_adamw.py",
    "tests/python/ops/test_fused_sgd.py",
    "tests/python/ops/test_muon.py",
    "tests/python/ops/test_norm_and_check.py",
    "tests/python/ops/test_step_copies.py",
    "tests/python/ops/test_unscale_and_check.py",
    "tests/python/ops/test_update_scale.py",
    "tests/python/optim/test_against_torch.py",
    "tests/python/optim/test_moments_in_8_bits.py",
    "tests/python/optim/test_remainders.py",
    "tests/python/scaler/test_clipping.py",
    "tests/python/scaler/test_scenarios.py",
)


def pip(folder: Path, *arguments: str) -> None:
    """Has this machine's pip unpack packages into a folder."""
    command = ("-m", "pip", "--disable-pip-version-check", "install", "-q", "--target", str(folder))
    run(Path(sys.executable), *command, *arguments)


def install_packages() -> None:
    """Unpacks torch and what tests need into SITE, once for each state of the pinned versions."""
    wanted = [PINNED_TORCH, *read_pyproject()["project"]["optional-dependencies"]["test"]]
    stamp = WORK / "packages.txt"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == "\n".join(wanted):
        return
    print(f"unpacking {PINNED_TORCH} for aarch64 into {SITE.relative_to(ROOT)}: 5 GB", flush=True)
    shutil.rmtree(SITE, ignore_errors=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    pip(SITE, "--only-binary", ":all:", "--python-version", PYTHON, *platforms, *wanted)
    stamp.write_text("\n".join(wanted), encoding="utf-8")


def install_nvcc() -> None:
    """Puts this machine's CUDA compilers beside the CUDA libraries for aarch64."""
    (toolkit,) = distributions(name="cuda-toolkit", path=[str(SITE)])
    host = WORK / f"nvcc-{toolkit.version}"
    if not host.exists():
        pip(host, f"cuda-toolkit[nvcc,crt,nvvm,cccl]=={toolkit.version}")

    def copy_missing(source: str, target: str) -> None:
        if not Path(target).exists():
            shutil.copy2(source, target)

    parts = Path("nvidia") / "cu13"
    shutil.copytree(host / parts, SITE / parts, copy_function=copy_missing, dirs_exist_ok=True)


def build(python: str, cuda: str, jobs: int) -> None:
    """Builds the library, the module and the tests, and puts the package into SITE."""
    package = SITE / "fastamp"
    shutil.rmtree(package, ignore_errors=True)
    native = ("*.so", "build_info.json", "include", "lib", "share", "__pycache__")
    ignored = shutil.ignore_patterns(*native)
    shutil.copytree(ROOT / "python" / "fastamp", package, ignore=ignored)
    options = {
        "CMAKE_TOOLCHAIN_FILE": ROOT / "cmake" / "aarch64-linux-gnu.cmake",
        "FASTAMP_AARCH64_ROOT": Path(python).parents[2],
        "CMAKE_PREFIX_PATH": SITE / "torch",
        "FASTAMP_CUDA": cuda,
    }
    own = " ".join(f"-D{name}={value}" for name, value in options.items())
    os.environ["CMAKE_ARGS"] = f"{own} {os.environ.get('CMAKE_ARGS', '')}"
    Build(BUILD_DIR, package, tests="ON", product=True, jobs=jobs, python=python).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if everything passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuda", choices=("ON", "OFF"), default="OFF")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    WORK.mkdir(parents=True, exist_ok=True)
    python = debian_python.provide(PYTHON, DEBIAN)
    if python is None:
        raise SystemExit("fastamp: there is no Python for aarch64: apt unpacks it, on Debian 12")
    install_packages()
    if options.cuda == "ON":
        install_nvcc()
    build(python, options.cuda, options.jobs)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as tools/run_tests.py
    # Of what qemu says by itself that it has, some is missing: torch's convolutions of float16 die.
    os.environ["QEMU_CPU"] = "neoverse-n1"
    seconds = round(patience(SLOWNESS * CTEST_SECONDS))
    ctest = ctest_command(BUILD_DIR, processes=options.jobs)
    failed = subprocess.call([*ctest, "-LE", "flavours", "--timeout", str(seconds)])
    tests = ("-m", "pytest", *PYTEST_OPTIONS, "-m", "not long", *SMOKE)
    failed |= run(Path(python), *tests, check=False, PYTHONPATH=str(SITE))
    return int(bool(failed))


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"fastamp: aarch64 failed: {error}") from None
