# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import tarfile
from importlib.metadata import version

import pytest

from packaging_tools import ROOT, call, find_tool

TRACKED = ("CMakeLists.txt", "VERSION", "setup.py", "pyproject.toml", "tools/cmake_build.py")


pytestmark = pytest.mark.skipif(
    int(version("setuptools").split(".")[0]) < 77, reason="pyproject.toml needs setuptools >= 77"
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("fastamp-*.tar.gz")
    return archive


def test_source_archive_holds_all_that_the_build_reads_and_nothing_built(archive):
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {
        str(path.relative_to(ROOT))
        for folder in ("cmake", "include", "src", "python/csrc")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    }
    assert wanted.union(TRACKED) <= names
    assert not [name for name in names if name.endswith(".so") or name.startswith("build/")]


@pytest.mark.parametrize("command", ["setup.py", "cmake"])
def test_an_unpacked_archive_configures(tmp_path, archive, command):
    """As setup.py does it, and as somebody does it who has the archive and knows CMake."""
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("fastamp-*")
    options = [f"-DPython3_EXECUTABLE={sys.executable}", "-DFASTAMP_CUDA=OFF"]
    if command == "setup.py":
        options += ["-DFASTAMP_BUILD_TESTS=OFF", "-DFASTAMP_BUILD_PYTHON=ON"]
    make = f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}"
    status, output = call(
        *(find_tool("cmake"), "-S", source, "-B", tmp_path / "build", "-GNinja", make), *options
    )
    assert status == 0, output
