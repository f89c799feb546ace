# SPDX-License-Identifier: Apache-2.0
"""What CMake reads from a torch's headers, with torches made of a few lines."""

import subprocess

import pytest

from packaging_tools import ROOT, find_tool

ATEN = """#if !defined(_MSC_VER) && __cplusplus < {number}
#error C++{standard} or later compatible compiler is required to use ATen.
#endif
"""
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(reader LANGUAGES CXX)
include("{cmake}/FastampTorch.cmake")
add_library(reader OBJECT reader.cpp)
target_link_libraries(reader PRIVATE fastamp_torch::cpu)
message(STATUS "FOUND=${{FASTAMP_TORCH_VERSION}},${{FASTAMP_TORCH_CXX}};")
"""


def made_up_torch(folder, aten):
    """A folder with the files that are looked for."""
    files = {
        "lib/libtorch_cpu.so": "",
        "include/ATen/core/Tensor.h": "",
        "include/ATen/ATen.h": aten,
        "include/torch/csrc/api/include/torch/torch.h": "",
        "include/torch/headeronly/version.h": "".join(
            f"#define TORCH_VERSION_{name} {value}\n"
            for name, value in (("MAJOR", 9), ("MINOR", 8), ("PATCH", 7))
        ),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("aten", "standard"),
    [
        (ATEN.format(number="201703L", standard=17), 17),
        (ATEN.format(number="202002L", standard=20), 20),
        ("", 17),
    ],
)
def test_programs_are_compiled_with_the_standard_that_torch_asks_for(tmp_path, aten, standard):
    torch = made_up_torch(tmp_path / "torch", aten)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(cmake=ROOT / "cmake"))
    (tmp_path / "reader.cpp").write_text(
        f"#include <ATen/ATen.h>\nstatic_assert(__cplusplus >= {standard}03L);\n"
    )
    build = tmp_path / "build"
    # A compiler whose own default is older than both.
    options = [f"-DTorch_DIR={torch}", "-DCMAKE_CXX_FLAGS=-std=c++14"]
    configure = [find_tool("cmake"), "-S", tmp_path, "-B", build, *options]
    said = subprocess.check_output(configure, text=True, stderr=subprocess.STDOUT)
    assert f"FOUND=9.8.7,{standard};" in said
    subprocess.run([find_tool("cmake"), "--build", build], check=True, capture_output=True)
