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


@dataclass(frozen=True)
class Build:
    """One CMake build.

    Attributes:
        build_dir: Where CMake builds; kept between runs.
        package_dir: Python package folder that the result is installed into.
        tests: Whether the C++ tests are built.
        relocatable: Whether the result may not name this machine's folders (wheels).
        jobs: Compilations at the same time.
        python: The interpreter whose torch is built against.
    """

    build_dir: Path
    package_dir: Path
    tests: bool = False
    relocatable: bool = False
    jobs: int = os.cpu_count() or 1
    python: str = sys.executable

    def configure_command(self) -> list[str]:
        """Returns the cmake command line; ``CMAKE_ARGS`` of the environment comes last and wins."""
        command = [
            find_tool("cmake"),
            f"-S{ROOT}",
            f"-B{self.build_dir}",
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('CMAKE_BUILD_TYPE', 'Release')}",
            f"-DPython3_EXECUTABLE={self.python}",
            f"-DFASTAMP_BUILD_TESTS={cmake_bool(self.tests)}",
            "-DFASTAMP_BUILD_PYTHON=ON",
            "-DCMAKE_INSTALL_LIBDIR=lib",
        ]
        if shutil.which("ccache"):
            command += [f"-DCMAKE_{lang}_COMPILER_LAUNCHER=ccache" for lang in ("CXX", "CUDA")]
        return command + shlex.split(os.environ.get("CMAKE_ARGS", ""))

    def run(self) -> None:
        """Builds and installs into the package.

        Raises:
            subprocess.CalledProcessError: A step failed; its output is on stderr.
        """
        self._configure()
        cmake = find_tool("cmake")
        subprocess.run([cmake, "--build", self.build_dir, f"-j{self.jobs}"], check=True)
        install = [cmake, "--install", str(self.build_dir), "--prefix", str(self.package_dir)]
        environment = dict(os.environ)
        if self.relocatable:
            environment["FASTAMP_RELOCATABLE"] = "1"  # read by cmake/FastampInstall.cmake
        for component in ("fastamp", "python"):
            # Lists every file it finds up to date; only errors are news.
            subprocess.run(
                [*install, "--component", component],
                check=True,
                stdout=subprocess.DEVNULL,
                env=environment,
            )

    def _configure(self) -> None:
        command = self.configure_command()
        wanted = "\n".join([*command, os.environ.get("TORCH_CUDA_ARCH_LIST", "")])
        stamp = self.build_dir / "fastamp_configured.txt"
        if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
            return
        self.build_dir.mkdir(parents=True, exist_ok=True)
        # Another interpreter or compiler must not meet what the last one left in the cache.
        (self.build_dir / "CMakeCache.txt").unlink(missing_ok=True)
        subprocess.run(command, check=True)
        stamp.write_text(wanted, encoding="utf-8")


def cmake_bool(value: bool) -> str:
    """Returns CMake's word for a truth value."""
    return "ON" if value else "OFF"


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
    parser.add_argument("--tests", action="store_true", help="build the C++ tests")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    package_dir = ROOT / "python" / "fastamp"
    Build(options.build_dir.resolve(), package_dir, options.tests, jobs=options.jobs).run()


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"fastamp: build failed (exit status {error.returncode})") from None
