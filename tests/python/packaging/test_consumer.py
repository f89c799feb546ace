# SPDX-License-Identifier: Apache-2.0
"""Programs of C++ users: each way of using fastamp is built, without Python, and run."""

import copy
import math
import shutil
import subprocess
import sys

import pytest
import torch

import fastamp
from packaging_tools import (
    ROOT,
    TORCH_DIR,
    TORCH_PREFIX,
    build_and_run,
    call,
    configure,
    find_tool,
)

VERSIONS = f"fastamp {fastamp.__version__}, torch {fastamp.build_info()['torch_version']}"


@pytest.fixture
def libtorch_folder(tmp_path):
    """A folder as LibTorch's archives have it: no Python package around it."""
    folder = tmp_path / "libtorch"
    folder.mkdir()
    for name in ("include", "lib", "share"):
        (folder / name).symlink_to(TORCH_DIR / name)
    return folder


def fake_torch(folder, version):
    """A torch of another version, as far as its headers say."""
    headers = folder / "include" / "torch" / "headeronly"
    headers.mkdir(parents=True)
    major, minor, patch = version.split(".")
    (headers / "version.h").write_text(
        f"#define TORCH_VERSION_MAJOR {major}\n"
        f"#define TORCH_VERSION_MINOR {minor}\n"
        f"#define TORCH_VERSION_PATCH {patch}\n"
    )
    (folder / "include" / "ATen").symlink_to(TORCH_DIR / "include" / "ATen")
    (folder / "lib").symlink_to(TORCH_DIR / "lib")
    return folder


def test_find_package_needs_neither_python_nor_a_cuda_toolkit(tmp_path):
    status, output = configure(tmp_path, [TORCH_PREFIX, fastamp.cpp.cmake_prefix_path])
    assert status == 0, output
    assert "CMAKE_CUDA_COMPILER" not in (tmp_path / "CMakeCache.txt").read_text()
    assert build_and_run(tmp_path) == (0, VERSIONS)
    carries_states_between_languages(tmp_path)


def carries_states_between_languages(folder):
    """A scaler's state goes from Python to the program and back, by both scalers."""
    options = {"init_scale": 1024.0, "growth_interval": 3}
    plain = torch.amp.GradScaler("cpu", **options)
    rich = fastamp.GradScaler("cpu", history_size=8, min_scale=2.0, hysteresis=2, **options)
    for scaler in (plain, rich):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        for gradient in (1.0, 1.0, math.inf, 1.0):
            step(scaler, optimizer, weight, gradient)
        torch.save(scaler.state_dict(), folder / "python.pt")
        status, text = call(folder / "consumer", folder / "python.pt", folder / "cpp.pt")
        assert status == 0, text
        loaded = copy.deepcopy(scaler)
        loaded.load_state_dict(torch.load(folder / "cpp.pt", weights_only=False))
        for gradient in (1.0, math.inf):  # What the program did.
            step(scaler, optimizer, weight, gradient)
        assert loaded.state_dict() == scaler.state_dict()


def step(scaler, optimizer, weight, gradient):
    optimizer.zero_grad()
    scaler.scale((weight * gradient).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_find_package_takes_a_libtorch_folder(tmp_path, libtorch_folder):
    build_dir = tmp_path / "build"
    status, output = configure(build_dir, [libtorch_folder, fastamp.cpp.cmake_prefix_path])
    assert status == 0, output
    assert build_and_run(build_dir) == (0, VERSIONS)


def test_find_package_works_after_the_programs_own_find_package_torch(tmp_path):
    if torch.version.cuda and not has_toolkit_of_torch():
        pytest.skip("find_package(Torch) itself stops: CUDA build of torch, no CUDA toolkit")
    status, output = configure(
        tmp_path, [TORCH_PREFIX, fastamp.cpp.cmake_prefix_path], "-DCONSUMER_FINDS_TORCH=ON"
    )
    assert status == 0, output
    assert build_and_run(tmp_path) == (0, VERSIONS)


def has_toolkit_of_torch():
    nvcc = shutil.which("nvcc")
    return nvcc is not None and f"release {torch.version.cuda}" in call(nvcc, "--version")[1]


def test_find_package_asks_python_when_no_folder_names_torch(tmp_path):
    status, output = configure(
        tmp_path,
        [fastamp.cpp.cmake_prefix_path],
        f"-DPython3_EXECUTABLE={sys.executable}",
        python=True,
    )
    assert status == 0, output
    assert build_and_run(tmp_path) == (0, VERSIONS)


def test_find_package_refuses_another_minor_version_of_torch(tmp_path):
    other = fake_torch(tmp_path / "torch", "2.99.0")
    status, output = configure(tmp_path / "build", [other, fastamp.cpp.cmake_prefix_path])
    assert status != 0
    built = ".".join(torch.__version__.split(".")[:2])
    assert f"built with torch {built}, but torch 2.99 was found" in output


def test_find_package_says_so_when_there_is_no_torch(tmp_path):
    status, output = configure(tmp_path, [fastamp.cpp.cmake_prefix_path])
    assert status != 0
    assert "no torch in CMAKE_PREFIX_PATH" in output


def test_find_package_is_compatible_with_its_own_minor_version_only(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(p LANGUAGES CXX)\n"
        "find_package(fastamp 0.999 REQUIRED)\n"
    )
    status = subprocess.run(
        [
            find_tool("cmake"),
            *("-S", source, "-B", tmp_path / "build"),
            f"-DCMAKE_PREFIX_PATH={TORCH_PREFIX};{fastamp.cpp.cmake_prefix_path}",
        ],
        capture_output=True,
        check=False,
    ).returncode
    assert status != 0


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).relu()


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """What AOTInductor makes of a model, and what the model gives for the program's input."""
    torch.manual_seed(0)
    model = Classifier()
    inputs = torch.linspace(-1, 1, 8).reshape(2, 4)
    path = tmp_path_factory.mktemp("package") / "classifier.pt2"
    torch._inductor.aoti_compile_and_package(
        torch.export.export(model, (inputs,)), package_path=str(path)
    )
    return path, model(inputs).flatten().tolist()


def run_package(build_dir, package):
    path, expected = package
    status, output = build_and_run(build_dir, "run_package", path)
    assert status == 0, output
    assert [float(word) for word in output.split()] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # AOTInductor and the program: 40 s of compilation
def test_a_program_loads_what_aotinductor_compiled(tmp_path, package):
    # call() sets no LD_LIBRARY_PATH: the package needs libtorch.so and names no folder for it.
    status, output = configure(
        tmp_path, [TORCH_PREFIX, fastamp.cpp.cmake_prefix_path], "-DCONSUMER_LOADS_PACKAGES=ON"
    )
    assert status == 0, output
    run_package(tmp_path, package)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # compiles all of fastamp once more where ccache does not have it
def test_add_subdirectory_builds_for_a_libtorch_folder_without_python(libtorch_folder, package):
    build_dir = ROOT / "build" / "consumer"  # kept: the second time only links
    status, output = configure(
        build_dir,
        [libtorch_folder],
        f"-DFASTAMP_SOURCE_DIR={ROOT}",
        "-DFASTAMP_CUDA=OFF",
        "-DCONSUMER_LOADS_PACKAGES=ON",
    )
    assert status == 0, output
    assert "CPU-only build (FASTAMP_CUDA=OFF)" in output
    assert build_and_run(build_dir) == (0, VERSIONS)
    run_package(build_dir, package)
