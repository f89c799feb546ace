# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import tarfile
from importlib.metadata import version

import pytest

from packaging_tools import ROOT

TRACKED = ("CMakeLists.txt", "VERSION", "setup.py", "pyproject.toml", "tools/cmake_build.py")


@pytest.mark.skipif(
    int(version("setuptools").split(".")[0]) < 77, reason="pyproject.toml needs setuptools >= 77"
)
def test_source_archive_holds_all_that_the_build_reads_and_nothing_built(tmp_path):
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("fastamp-*.tar.gz")
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
