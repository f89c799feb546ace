# SPDX-License-Identifier: Apache-2.0
"""A fastamp built for another torch says so in one ImportError, before its library is opened."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastamp
from fastamp._loader import check_versions

BUILT = {"torch_version": "2.11.0", "cuda_version": "13.0"}


@pytest.mark.parametrize(
    ("built_cuda", "torch_version", "torch_cuda"),
    [
        ("13.0", "2.11.0+cu130", "13.0"),
        ("13.0", "2.11.1+cu132", "13.2"),  # patch releases and CUDA minors keep the ABI
        ("", "2.11.0+cpu", None),
        ("", "2.11.0+cu130", "13.0"),  # a CPU-only build links nothing of CUDA
    ],
)
def test_fitting_versions_are_accepted(built_cuda, torch_version, torch_cuda):
    check_versions({**BUILT, "cuda_version": built_cuda}, torch_version, torch_cuda)


@pytest.mark.parametrize(
    ("torch_version", "torch_cuda"),
    [
        ("2.12.0+cu130", "13.0"),
        ("2.1.0+cu130", "13.0"),
        ("3.11.0", "13.0"),
        ("2.11.0+cu126", "12.6"),
        ("2.11.0+cpu", None),
    ],
)
def test_other_versions_are_refused_with_both_named(torch_version, torch_cuda):
    with pytest.raises(ImportError) as error:
        check_versions(BUILT, torch_version, torch_cuda)
    message = str(error.value)
    assert "built for torch 2.11.0 (CUDA 13.0)" in message
    assert f"this is torch {torch_version} (CUDA {torch_cuda or 'none'})" in message
    assert "pip install --no-build-isolation" in message


def import_copy(folder, info):
    """Imports a copy of the package whose native module is no library at all."""
    source = Path(fastamp.__file__).parent
    package = folder / "fastamp"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("*.so", "build_info.json"))
    (module,) = source.glob("_C.*.so")
    (package / module.name).write_bytes(b"opening this would be another error")
    if info is not None:
        (package / "build_info.json").write_text(json.dumps(info))
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import fastamp"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode, result.stderr


def test_import_of_a_build_for_another_torch_is_one_clear_error(tmp_path):
    info = {"version": "0.1.0", "torch_version": "2.99.0", "cuda_version": ""}
    status, stderr = import_copy(tmp_path, info)
    assert status == 1
    assert stderr.count("Error: ") == 1
    assert "ImportError: fastamp was built for torch 2.99.0 (CUDA none), but this is" in stderr


def test_import_of_a_package_without_its_native_part_says_how_to_build(tmp_path):
    status, stderr = import_copy(tmp_path, None)
    assert status == 1
    assert "has no native part. Build it: pip install --no-build-isolation" in stderr
