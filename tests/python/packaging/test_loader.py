# SPDX-License-Identifier: Apache-2.0
"""A fastamp built for another torch says so in one ImportError, before its library is opened."""

import importlib.machinery
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastamp
from fastamp._util.loader import check_version, native_folder


@pytest.mark.parametrize("torch_version", ["2.11.0+cu130", "2.11.1+cu126", "2.11.0+cpu", "2.11.2"])
def test_patch_releases_and_any_cuda_are_accepted(torch_version):
    check_version("2.11.0", torch_version)


@pytest.mark.parametrize("torch_version", ["2.12.0+cu130", "2.1.0+cu130", "3.11.0"])
def test_other_versions_are_refused_with_both_named(torch_version):
    with pytest.raises(ImportError) as error:
        check_version("2.11.0", torch_version)
    message = str(error.value)
    assert f"built for torch 2.11.0, but this is torch {torch_version}. " in message
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
    assert "ImportError: fastamp was built for torch 2.99.0, but this is torch " in stderr


def test_import_of_a_package_without_its_native_part_says_how_to_build(tmp_path):
    status, stderr = import_copy(tmp_path, None)
    assert status == 1
    assert "has no native part. Build it: pip install --no-build-isolation" in stderr


@pytest.fixture
def wheel(tmp_path):
    """A package folder as a wheel for several versions has it, without a line of code in it."""
    here = f"{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    for minor, pythons in {"2.9": ("312",), "2.10": (here, "39"), "2.11": (here, "399")}.items():
        part = tmp_path / "_native" / f"torch{minor}"
        part.mkdir(parents=True)
        (part / "build_info.json").write_text("{}")
        for python in pythons:
            (part / f"_C.cpython-{python}-x86_64-linux-gnu.so").touch()
        if here in pythons:
            (part / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("torch_version", "part"),
    [("2.10.0+cpu", "torch2.10"), ("2.10.1", "torch2.10"), ("2.11.0a0+git12", "torch2.11")],
)
def test_the_part_of_torchs_minor_version_is_picked(wheel, torch_version, part):
    assert native_folder(wheel, torch_version) == wheel / "_native" / part


@pytest.mark.parametrize("torch_version", ["2.1.0", "2.12.0+cu130", "3.11.0"])
def test_a_torch_without_a_part_is_refused_with_all_that_there_are(wheel, torch_version):
    with pytest.raises(ImportError) as error:
        native_folder(wheel, torch_version)
    message = str(error.value)
    python = ".".join(map(str, sys.version_info[:3])) + sys.abiflags
    here = ".".join(map(str, sys.version_info[:2])) + sys.abiflags
    assert message.startswith(
        f"this is torch {torch_version} with Python {python}, and fastamp in "
    )
    assert "torch 2.9 with Python 3.12; torch 2.10 with Python 3.9, " in message
    assert f"torch 2.11 with Python {here}, 3.99. Install one of these" in message
    assert "pip install --no-build-isolation" in message


def test_a_python_without_a_module_is_refused(wheel):
    for module in (wheel / "_native" / "torch2.11").glob("_C*"):
        if "399" not in module.name:
            module.unlink()
    with pytest.raises(ImportError, match=r"torch 2\.11 with Python 3\.99\. Install one"):
        native_folder(wheel, "2.11.0")


def test_a_python_without_a_gil_is_refused_where_there_is_the_other_alone(wheel, monkeypatch):
    """Free-threaded Pythons look for modules of their own and are called as users call them."""
    part = wheel / "_native" / "torch2.11"
    (part / "_C.cpython-313t-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(sys, "abiflags", "t")
    suffixes = [".cpython-398t-x86_64-linux-gnu.so", ".so"]
    monkeypatch.setattr("fastamp._util.loader.EXTENSION_SUFFIXES", suffixes)
    python = ".".join(map(str, sys.version_info[:3])) + "t"
    listed = r"3\.13t, (3\.1\dt?, )?3\.99\. Install one"
    with pytest.raises(ImportError, match=rf"with Python {python}, .*{listed}"):
        native_folder(wheel, "2.11.0")
    (part / "_C.cpython-398t-x86_64-linux-gnu.so").touch()
    assert native_folder(wheel, "2.11.0") == part


def test_a_build_from_source_is_taken_whatever_else_there_is(wheel):
    (wheel / "build_info.json").write_text("{}")
    assert native_folder(wheel, "2.99.0") == wheel


def test_a_package_in_parts_is_imported_from_the_one_that_fits(tmp_path):
    """This build, moved to where a wheel for several versions has it."""
    source = Path(fastamp._C.__file__).parent
    package = tmp_path / "fastamp"
    native = ("*.so", "build_info.json", "lib", "share", "include", "_native")
    shutil.copytree(Path(fastamp.__file__).parent, package, ignore=shutil.ignore_patterns(*native))
    part = package / "_native" / f"torch{'.'.join(torch.__version__.split('.')[:2])}"
    part.mkdir(parents=True)
    for name in ("lib", "share"):
        (part / name).symlink_to(source / name)
    for file in (Path(fastamp._C.__file__), source / "build_info.json"):
        (part / file.name).symlink_to(file)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fastamp; "
        "print(fastamp._C.__file__, fastamp.cpp.cmake_prefix_path, fastamp.cpp.include_path)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    module = part / Path(fastamp._C.__file__).name
    assert said == [str(module), str(part / "share" / "cmake"), str(part / "include")]
