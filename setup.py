# SPDX-License-Identifier: Apache-2.0
"""Packs what CMake builds; everything about compiling is in CMakeLists.txt.

torch must be installed before, and pip must not isolate the build: in an isolated build pip would
fetch another torch than the one that the result is to be used with, and LibTorch's ABI differs
between minor versions. So: ``pip install --no-build-isolation .``
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from cmake_build import Build  # noqa: E402  (needs the line above)

#: For a wheel that carries several native parts (tools/build_wheel.py): the folder that holds them,
#: one folder for each minor version of torch.
PARTS = os.environ.get("FASTAMP_NATIVE_PARTS", "")


def torch_requirement() -> str:
    """Returns which torches the result is for."""
    if not PARTS:
        # Without torch (an sdist) nothing is known of the ABI yet; building refuses in that case.
        return f"torch=={minor}.*" if (minor := torch_minor()) else "torch"
    numbers = sorted(int(path.name.rpartition(".")[2]) for path in Path(PARTS).glob("torch2.*"))
    gaps = (n for n in range(numbers[0], numbers[-1]) if n not in numbers)
    left_out = "".join(f",!=2.{number}.*" for number in gaps)
    return f"torch>=2.{numbers[0]},<2.{numbers[-1] + 1}{left_out}"


def torch_minor() -> str:
    """Returns "2.11" for the torch of this interpreter, or "" where there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return ".".join(version("torch").split(".")[:2])
    except PackageNotFoundError:
        return ""


class CMakeBuild(build_ext):
    """Runs CMake; the libraries, headers and CMake package files land in the package's folder."""

    def run(self) -> None:
        """Builds into the source tree for an editable install, into build_lib for a wheel.

        Raises:
            SystemExit: There is no torch to build against.
        """
        if PARTS:
            shutil.copytree(PARTS, Path(self.build_lib).resolve() / "fastamp" / "_native")
            return
        if not torch_minor():
            raise SystemExit(
                "fastamp builds against an installed torch, and there is none for "
                f"{sys.executable}. Install torch first, then: pip install --no-build-isolation ."
            )
        in_place = self.inplace or self.editable_mode
        base = ROOT / "python" if in_place else Path(self.build_lib).resolve()
        build_dir = os.environ.get("FASTAMP_BUILD_DIR", str(ROOT / "build" / "setup"))
        Build(
            build_dir=Path(build_dir).resolve(),
            package_dir=base / "fastamp",
            tests="ON" if os.environ.get("FASTAMP_BUILD_TESTS") else "OFF",
            demo=bool(os.environ.get("FASTAMP_BUILD_DEMO")),
            site_packages="" if in_place else "..",
            jobs=int(os.environ.get("MAX_JOBS", os.cpu_count() or 1)),
        ).run()

    def get_outputs(self) -> list[str]:
        """Returns the files built into build_lib, for the wheel's record."""
        package = Path(self.build_lib) / "fastamp"
        return [str(path) for path in package.rglob("*") if path.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        """Returns nothing: an editable install builds where it is used."""
        return {}


class Wheel(bdist_wheel):
    """Names a wheel with several native parts for every Python 3: the loader picks."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns Python, ABI and platform."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if PARTS else (python, abi, platform)


# setuptools would keep its staging folder, and pack what an earlier version had left in it.
staging = tempfile.TemporaryDirectory(prefix="fastamp-")
setup(
    options={"build": {"build_base": staging.name}},
    ext_modules=[Extension("fastamp._C", sources=[])],
    cmdclass={"bdist_wheel": Wheel, "build_ext": CMakeBuild},
    install_requires=[
        torch_requirement(),
        "tomli; python_version < '3.11'",
    ],
)
