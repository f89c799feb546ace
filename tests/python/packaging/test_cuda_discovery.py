# SPDX-License-Identifier: Apache-2.0
"""CMake's choice of CUDA toolkit and architectures, with toolkits made of shell scripts."""

import os
import re
import shutil
import subprocess
import sys

import pytest

import fastamp
from packaging_tools import ROOT, find_tool

CMAKE = ROOT / "cmake"

WORKING = """#!/bin/sh
case "$*" in
*--version*) echo "Cuda compilation tools, release 99.1, V99.1.5" ;;
*) echo "#$ TOP=$(cd "$(dirname "$0")/.." && pwd)" >&2 ;;
esac
"""
BROKEN = WORKING.replace(">&2 ;;", ">&2; echo 'no cicc' >&2; exit 1 ;;")
OLDER = WORKING.replace("99.1", "98.4")


def script(tmp_path, text, **environment):
    """Runs CMake code that includes our modules; returns what it prints."""
    path = tmp_path / "script.cmake"
    path.write_text(
        f"cmake_minimum_required(VERSION 3.25)\nset(CMAKE_CXX_COMPILER c++)\n"
        f'set(CMAKE_BINARY_DIR "{tmp_path}")\n'
        f'include("{CMAKE}/FastampCudaArchitectures.cmake")\n'
        f'include("{CMAKE}/FastampCudaToolkit.cmake")\n{text}\n'
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CUDA")}
    clean.pop("TORCH_CUDA_ARCH_LIST", None)
    result = subprocess.run(
        [find_tool("cmake"), "-P", path],
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout


def toolkit(folder, nvcc):
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "nvcc").write_text(nvcc)
    (folder / "bin" / "nvcc").chmod(0o755)
    return folder


def find(tmp_path, *wheels, **environment):
    folders = " ".join(f'"{wheel}"' for wheel in wheels)
    text = f"fastamp_find_cuda_toolkit(99.1 root origin {folders})\n"
    status, output = script(tmp_path, text + 'message("ROOT=${root};")', **environment)
    assert status == 0, output
    return output.partition("ROOT=")[2].partition(";")[0], output


def test_a_working_system_toolkit_of_torchs_version_is_taken(tmp_path):
    system = toolkit(tmp_path / "system", WORKING)
    wheel = toolkit(tmp_path / "wheel", WORKING)
    root, _ = find(tmp_path, wheel, CUDA_HOME=str(system))
    assert root == str(system)


@pytest.mark.parametrize("nvcc", [OLDER, BROKEN])
def test_an_unusable_toolkit_is_passed_over_with_a_reason(tmp_path, nvcc):
    system = toolkit(tmp_path / "system", nvcc)
    root, output = find(tmp_path, CUDA_HOME=str(system))
    assert root == ""
    reason = "is CUDA '98.4', torch has 99.1" if nvcc == OLDER else "no cicc"
    assert f"{system}/bin/nvcc" in output
    assert reason in output


def test_toolkit_of_python_packages_is_taken_through_links_that_nvcc_and_linker_want(tmp_path):
    wheel = toolkit(tmp_path / "nvidia" / "cu99", WORKING)
    for name in ("lib/libcudart.so.99", "include/cuda.h", "nvvm/bin/cicc"):
        (wheel / name).parent.mkdir(parents=True, exist_ok=True)
        (wheel / name).touch()
    root, output = find(tmp_path, wheel)
    assert root == str(tmp_path / "cuda-from-python"), output
    links = tmp_path / "cuda-from-python"
    assert not (links / "bin").is_symlink()  # nvcc looks for its root beside its own folder
    for name in ("bin/nvcc", "lib64/libcudart.so", "lib/libcudart.so.99", "include/cuda.h"):
        assert (links / name).exists(), name
    assert (links / "nvvm" / "bin" / "cicc").exists()


def test_broken_toolkit_of_python_packages_is_no_toolkit(tmp_path):
    assert find(tmp_path, toolkit(tmp_path / "cu99", BROKEN))[0] == ""


@pytest.mark.parametrize(
    ("torch_list", "cmake_list"),
    [
        ("9.0", "90-real"),
        ("8.0;9.0+PTX", "80-real;90"),
        ("8.0 9.0a,10.0f", "80-real;90a-real;100f-real"),
        ("12.0+PTX", "120"),
    ],
)
def test_architectures_are_read_as_torchs_builds_write_them(tmp_path, torch_list, cmake_list):
    text = 'fastamp_default_architectures(archs)\nmessage("ARCHS=${archs}")'
    status, output = script(tmp_path, text, TORCH_CUDA_ARCH_LIST=torch_list)
    assert (status, output.strip()) == (0, f"ARCHS={cmake_list}")


@pytest.mark.parametrize("bad", ["Hopper", "90", "9.0+ptx", "9.0-real"])
def test_an_unknown_architecture_is_refused(tmp_path, bad):
    status, output = script(
        tmp_path, "fastamp_default_architectures(archs)", TORCH_CUDA_ARCH_LIST=bad
    )
    assert status != 0
    assert f"got '{bad}'" in " ".join(output.split())


def test_architectures_of_the_gpus_present_are_the_default(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '9.0\\n8.6\\n9.0\\n'\n")
    smi.chmod(0o755)
    text = 'fastamp_default_architectures(archs)\nmessage("ARCHS=${archs}")'
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert script(tmp_path, text, PATH=path) == (0, "ARCHS=90-real;86-real\n")


def test_release_architectures_where_there_is_no_gpu(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
    smi.chmod(0o755)
    text = 'fastamp_default_architectures(archs)\nmessage("ARCHS=${archs}")'
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert script(tmp_path, text, PATH=path) == (0, "ARCHS=80-real;90\n")


def cmake_without_cuda_cpp20():
    """The system's CMake, if it is one that does not know C++20 of nvcc's; else None."""
    system = shutil.which("cmake", path="/usr/bin")
    version = system and subprocess.check_output([system, "--version"], text=True).split()[2]
    return system if version and version.startswith("3.25.") else None


@pytest.mark.skipif(cmake_without_cuda_cpp20() is None, reason="the system has no CMake 3.25")
@pytest.mark.skipif(not fastamp.build_info()["cuda_version"], reason="there is no CUDA toolkit")
def test_the_oldest_cmake_compiles_cuda_sources_as_cpp20(tmp_path):
    command = [
        cmake_without_cuda_cpp20(),
        "-S",
        ROOT,
        "-B",
        tmp_path,
        "-GNinja",
        "-DFASTAMP_CUDA=ON",
    ]
    command += [f"-DPython3_EXECUTABLE={sys.executable}", "-DFASTAMP_BUILD_TESTS=OFF"]
    command += [f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rules = (tmp_path / "build.ninja").read_text().split("\nbuild ")
    flags = [re.search(r"FLAGS = (.*)", rule)[1] for rule in rules if ".cu.o:" in rule]
    assert len(flags) >= 10
    assert all("-std=c++20" in flag.split() for flag in flags)
