# SPDX-License-Identifier: Apache-2.0
"""Packs what CMake builds; everything about compiling is in CMakeLists.txt.

torch must be installed before, and pip must not isolate the build: in an isolated build pip would
fetch another torch than the one that the result is to be used with, and LibTorch's ABI differs
between minor versions. So: ``pip install --no-build-isolation .``
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from cmake_build import Build  # noqa: E402  (needs the line above)


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
            relocatable=not in_place,
            jobs=int(os.environ.get("MAX_JOBS", os.cpu_count() or 1)),
        ).run()

    def get_outputs(self) -> list[str]:
        """Returns the files built into build_lib, for the wheel's record."""
        package = Path(self.build_lib) / "fastamp"
        return [str(path) for path in package.rglob("*") if path.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        """Returns nothing: an editable install builds where it is used."""
        return {}


minor = torch_minor()
# setuptools would keep its staging folder, and pack what an earlier version had left in it.
staging = tempfile.TemporaryDirectory(prefix="fastamp-")
setup(
    options={"build": {"build_base": staging.name}},
    ext_modules=[Extension("fastamp._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    # Without torch (an sdist) nothing is known of the ABI yet; building refuses in that case.
    install_requires=[f"torch=={minor}.*"] if minor else ["torch"],
)
