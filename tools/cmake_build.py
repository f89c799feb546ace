# SPDX-License-Identifier: Apache-2.0
"""Configures, builds and installs fastamp with CMake: the one way for make and for setup.py.

Needs nothing but the standard library, cmake and ninja, so that it also runs where nothing may be
installed. A configured build folder is configured again only when its options change; CMake itself
notices changed CMake files.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_TARGETS = ("fastamp", "fastamp_python")
DEMO_TARGETS = (*PACKAGE_TARGETS, "digits")
GPU_TEST_TARGETS = (*PACKAGE_TARGETS, "fastamp_gpu_tests")
PRODUCT_TARGETS = (*DEMO_TARGETS, "fastamp_product_tests")
CUDA_OPTION = ("-DFASTAMP_CUDA=", "-DFASTAMP_CUDA:")
#: Variables of the environment that choose compilers and what they are told.
READ_BY_CMAKE = ("TORCH_CUDA_ARCH_LIST", "CXX", "CXXFLAGS", "CUDACXX", "CUDAFLAGS")
AUTO_TESTS = "-DFASTAMP_BUILD_TESTS=AUTO"
WITHOUT_CUDA = "No GPU here: building without the CUDA part. FASTAMP_CUDA=ON builds it."


@dataclass(frozen=True)
class Build:
    """One CMake build.

    Attributes:
        build_dir: Where CMake builds; kept between runs.
        package_dir: Python package folder that the result is installed into.
        tests: Whether the C++ tests are built: ``ON``, ``OFF``, or ``AUTO``: where Catch2 is
            installed.
        package: Build what the Python package needs and nothing else.
        gpu_tests: Build the C++ tests that need a GPU, those that compile, and nothing else.
        demo: Build what the demo needs and nothing else, and the CUDA part only where there is a
            GPU. A folder that is configured for more stays so.
        product: As demo, and the tests of `make test`.
        site_packages: For wheels, the way from the folder that is installed into to that of all
            packages: the result then names no folder of this machine.
        jobs: Compilations at the same time.
        python: The interpreter whose torch is built against.
        pythons: More interpreters that get a module.
    """

    build_dir: Path
    package_dir: Path
    tests: str = "OFF"
    package: bool = False
    gpu_tests: bool = False
    demo: bool = False
    product: bool = False
    site_packages: str = ""
    jobs: int = os.cpu_count() or 1
    python: str = sys.executable
    pythons: Sequence[str] = ()

    def configure_command(self) -> list[str]:
        """Returns the cmake command line.

        ``FASTAMP_CUDA`` of the environment is for all builds; ``CMAKE_ARGS`` comes last and wins.
        """
        command = [
            find_tool("cmake"),
            f"-S{ROOT}",
            f"-B{self.build_dir}",
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('CMAKE_BUILD_TYPE', 'Release')}",
            f"-DPython3_EXECUTABLE={self.python}",
            f"-DFASTAMP_BUILD_TESTS={self.tests}",
            "-DFASTAMP_BUILD_PYTHON=ON",
            "-DCMAKE_INSTALL_LIBDIR=lib",
        ]
        if shutil.which("ccache"):
            command += [f"-DCMAKE_{lang}_COMPILER_LAUNCHER=ccache" for lang in ("CXX", "CUDA")]
        given = shlex.split(os.environ.get("CMAKE_ARGS", ""))
        if cuda := os.environ.get("FASTAMP_CUDA"):
            command.append(f"-DFASTAMP_CUDA={cuda}")
        elif self._is_minimal and cuda_option(given) is None and not has_gpu():
            command.append("-DFASTAMP_CUDA=OFF")
        return command + given

    def run(self) -> None:
        """Builds and installs into the package.

        Raises:
            subprocess.CalledProcessError: A step failed; its output is on stderr.
        """
        self._configure()
        if left_out := tests_left_out(self.build_dir):
            print(f"left out: C++ tests: {left_out}", flush=True)
        cmake = find_tool("cmake")
        pythons = ";".join(self.pythons)
        # Also where an earlier build had some: their modules are not to be installed any more.
        if pythons != cached(self.build_dir, "FASTAMP_MORE_PYTHONS"):
            more = f"-DFASTAMP_MORE_PYTHONS={pythons}"
            subprocess.run([cmake, str(self.build_dir), more], check=True)
        wanted: tuple[str, ...] = PRODUCT_TARGETS if self.product else ()
        if self.gpu_tests:
            wanted = PACKAGE_TARGETS if left_out else GPU_TEST_TARGETS
        wanted = DEMO_TARGETS if self.demo else PACKAGE_TARGETS if self.package else wanted
        wanted = (*wanted, "fastamp_modules") if self.pythons else wanted
        targets = ["--target", *wanted] if wanted else []
        targets += ["--", "-k", "0"] if self.gpu_tests else []
        subprocess.run([cmake, "--build", self.build_dir, f"-j{self.jobs}", *targets], check=True)
        install = [cmake, "--install", str(self.build_dir), "--prefix", str(self.package_dir)]
        environment = dict(os.environ)
        if self.site_packages:
            # Read by cmake/FastampInstall.cmake.
            environment["FASTAMP_RELOCATABLE"] = self.site_packages
        for component in ("fastamp", "python"):
            # Lists every file it finds up to date; only errors are news.
            subprocess.run(
                [*install, "--component", component],
                check=True,
                stdout=subprocess.DEVNULL,
                env=environment,
            )

    @property
    def _is_minimal(self) -> bool:
        """Whether the CUDA part is left out where there is no GPU."""
        return self.demo or self.product

    def _configure(self) -> None:
        command = self.configure_command()
        wanted = [*command, *(os.environ.get(name, "") for name in READ_BY_CMAKE)]
        stamp = self.build_dir / "fastamp_configured.txt"
        if stamp.exists():
            configured = stamp.read_text(encoding="utf-8").split("\n")
            enough = ["-DFASTAMP_BUILD_TESTS=ON" if w == AUTO_TESTS else w for w in wanted]
            look_again = self.package and tests_left_out(self.build_dir)
            if configured in (wanted, enough) and not look_again:
                return
            if not tests_left_out(self.build_dir):
                configured = [
                    "-DFASTAMP_BUILD_TESTS=ON" if w == AUTO_TESTS else w for w in configured
                ]
            if self._is_minimal and has_more(configured, wanted):
                return
        if self._is_minimal and not chosen_cuda() and cuda_option(command) == "OFF":
            print(WITHOUT_CUDA, flush=True)
        self.build_dir.mkdir(parents=True, exist_ok=True)
        # Another interpreter or compiler must not meet what the last one left in the cache. Until
        # this configuration is complete, the folder has none.
        stamp.unlink(missing_ok=True)
        (self.build_dir / "CMakeCache.txt").unlink(missing_ok=True)
        subprocess.run(command, check=True)
        stamp.write_text("\n".join(wanted), encoding="utf-8")


def cached(build_dir: Path, name: str) -> str:
    """Returns the value of a variable in a build folder's cache; "" where there is none."""
    cache = build_dir / "CMakeCache.txt"
    lines = cache.read_text(encoding="utf-8").splitlines() if cache.is_file() else []
    found = (line.partition("=")[2] for line in lines if line.startswith(f"{name}:"))
    return next(found, "")


def tests_left_out(build_dir: Path) -> str:
    """Returns why a build folder has no C++ tests though they were asked for; else ""."""
    return cached(build_dir, "FASTAMP_TESTS_LEFT_OUT")


def cuda_option(command: Sequence[str]) -> str | None:
    """Returns what a cmake command line says of the CUDA part; None if nothing."""
    values = [word.partition("=")[2] for word in command if word.startswith(CUDA_OPTION)]
    return values[-1] if values else None


def chosen_cuda() -> str | None:
    """Returns what the user says of the CUDA part; None if nothing."""
    given = cuda_option(shlex.split(os.environ.get("CMAKE_ARGS", "")))
    return given or os.environ.get("FASTAMP_CUDA") or None


def has_more(configured: Sequence[str], wanted: Sequence[str]) -> bool:
    """Returns whether a build folder has what is wanted, and only more of it: tests, CUDA part."""
    tests = "-DFASTAMP_BUILD_TESTS="

    def rest(command: Sequence[str]) -> list[str]:
        return [word for word in command if not word.startswith((tests, *CUDA_OPTION))]

    if rest(configured) != rest(wanted):
        return False
    if f"{tests}ON" in wanted and f"{tests}ON" not in configured:
        return False
    own, cuda = cuda_option(configured) or "AUTO", cuda_option(wanted) or "AUTO"
    return own == cuda or (chosen_cuda() is None and own != "OFF")


def has_gpu() -> bool:
    """Returns whether the driver answers and knows a GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    answer = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
    return answer.returncode == 0 and "GPU" in answer.stdout


def find_tool(name: str) -> str:
    """Returns the path of cmake or ninja, those beside this interpreter first.

    Raises:
        SystemExit: It is not installed.
    """
    beside = Path(sys.executable).parent
    path = shutil.which(name, path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        raise SystemExit(f"fastamp needs {name} to build: {sys.executable} -m pip install {name}")
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds into python/fastamp of this checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "make")
    parser.add_argument(
        "--tests",
        nargs="?",
        choices=("ON", "OFF", "AUTO"),
        default="OFF",
        const="ON",
        help="build the C++ tests; AUTO: where Catch2 is installed",
    )
    parser.add_argument("--package", action="store_true", help="build the Python package alone")
    parser.add_argument("--gpu-tests", action="store_true", help="build the C++ tests for GPUs")
    parser.add_argument("--demo", action="store_true", help="build what the demo needs, no more")
    parser.add_argument("--product", action="store_true", help="as --demo, and tests of make test")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    Build(
        options.build_dir.resolve(),
        ROOT / "python" / "fastamp",
        tests=options.tests,
        package=options.package,
        gpu_tests=options.gpu_tests,
        demo=options.demo,
        product=options.product,
        jobs=options.jobs,
    ).run()


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"fastamp: build failed (exit status {error.returncode})") from None
