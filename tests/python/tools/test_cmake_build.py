# SPDX-License-Identifier: Apache-2.0
"""What each kind of build configures: nobody waits for parts that he did not ask for."""

import subprocess
import sys

import pytest

import cmake_build
from cmake_build import Build

OFF = "-DFASTAMP_CUDA=OFF"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine without a GPU and without wishes in the environment."""
    monkeypatch.setattr(cmake_build, "has_gpu", lambda: False)
    for name in ("FASTAMP_CUDA", "CMAKE_ARGS", "CMAKE_BUILD_TYPE", *cmake_build.READ_BY_CMAKE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def calls(monkeypatch):
    commands = []
    monkeypatch.setattr(
        cmake_build.subprocess, "run", lambda command, **_: commands.append(list(map(str, command)))
    )
    return commands


def run(tmp_path, calls, **kind):
    """Runs a build; returns how it configured (None if not at all) and what it built."""
    calls.clear()
    Build(tmp_path / "build", tmp_path / "package", **kind).run()
    configured = [call for call in calls if "-GNinja" in call]
    (built,) = (call for call in calls if "--build" in call)
    targets = built[built.index("--target") + 1 :] if "--target" in built else ["all"]
    assert (built[-3:] == ["--", "-k", "0"]) == kind.get("gpu_tests", False)  # all that compiles
    return (configured[0] if configured else None), targets


def test_demo_builds_its_targets_without_tests_and_without_cuda(tmp_path, calls, capsys):
    configured, targets = run(tmp_path, calls, demo=True)
    assert OFF in configured
    assert "-DFASTAMP_BUILD_TESTS=OFF" in configured
    assert targets == ["fastamp", "fastamp_python", "digits"]
    assert capsys.readouterr().out == (
        "No GPU here: building without the CUDA part. FASTAMP_CUDA=ON builds it.\n"
    )


def test_other_builds_leave_cuda_to_cmake_and_build_all(tmp_path, calls, capsys):
    for kind in ({"tests": "ON"}, {}):
        configured, targets = run(tmp_path, calls, **kind)
        assert cmake_build.cuda_option(configured) is None
        assert targets == ["all"]
    assert capsys.readouterr().out == ""


def test_with_a_gpu_the_demo_leaves_cuda_to_cmake(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(cmake_build, "has_gpu", lambda: True)
    assert cmake_build.cuda_option(run(tmp_path, calls, demo=True)[0]) is None


@pytest.mark.parametrize(
    ("name", "value"), [("FASTAMP_CUDA", "{}"), ("CMAKE_ARGS", "-Da=b -DFASTAMP_CUDA={}")]
)
@pytest.mark.parametrize("wish", ["ON", "AUTO", "OFF"])
def test_wishes_decide(tmp_path, calls, monkeypatch, capsys, name, value, wish):
    monkeypatch.setenv(name, value.format(wish))
    for kind in ({"tests": "ON"}, {"demo": True}):
        configured = run(tmp_path, calls, **kind)[0]
        assert configured is None or cmake_build.cuda_option(configured) == wish
    assert capsys.readouterr().out == ""


def test_demo_turns_no_folder_back(tmp_path, calls, monkeypatch):
    run(tmp_path, calls, tests="ON")
    assert run(tmp_path, calls, demo=True) == (None, ["fastamp", "fastamp_python", "digits"])
    monkeypatch.setenv("FASTAMP_CUDA", "ON")
    run(tmp_path, calls, tests="ON")
    monkeypatch.delenv("FASTAMP_CUDA")
    assert run(tmp_path, calls, demo=True)[0] is None


def test_the_products_tests_are_built_without_cuda_and_need_no_more_than_what_has_them(
    tmp_path, calls
):
    targets = ["fastamp", "fastamp_python", "digits", "fastamp_product_tests"]
    run(tmp_path, calls, demo=True)
    configured, built = run(tmp_path, calls, tests="ON", product=True)
    assert OFF in configured
    assert "-DFASTAMP_BUILD_TESTS=ON" in configured
    assert built == targets
    assert run(tmp_path, calls, tests="ON", product=True) == (None, targets)
    for tests in ("ON", "AUTO"):  # As make gpu configures it, on a simulated device too.
        run(tmp_path, calls, tests="OFF")
        run(tmp_path, calls, tests=tests)
        assert run(tmp_path, calls, tests="ON", product=True) == (None, targets)


def test_full_build_after_the_demo_adds_tests_and_cuda(tmp_path, calls):
    run(tmp_path, calls, demo=True)
    configured = run(tmp_path, calls, tests="ON")[0]
    assert OFF not in configured
    assert "-DFASTAMP_BUILD_TESTS=ON" in configured


def test_demo_configures_anew_for_a_wish_a_gpu_or_other_options(tmp_path, calls, monkeypatch):
    run(tmp_path, calls, demo=True)
    assert run(tmp_path, calls, demo=True)[0] is None
    monkeypatch.setenv("FASTAMP_CUDA", "ON")
    assert "-DFASTAMP_CUDA=ON" in run(tmp_path, calls, demo=True)[0]
    monkeypatch.setenv("FASTAMP_CUDA", "OFF")
    assert OFF in run(tmp_path, calls, demo=True)[0]
    monkeypatch.delenv("FASTAMP_CUDA")
    monkeypatch.setattr(cmake_build, "has_gpu", lambda: True)
    assert OFF not in run(tmp_path, calls, demo=True)[0]
    monkeypatch.setenv("CMAKE_BUILD_TYPE", "Debug")
    assert run(tmp_path, calls, demo=True)[0] is not None


@pytest.mark.parametrize("name", ["CXX", "CXXFLAGS", "CUDACXX"])
def test_another_compiler_configures_anew(tmp_path, calls, monkeypatch, name):
    run(tmp_path, calls, demo=True)
    monkeypatch.setenv(name, "other")
    assert run(tmp_path, calls, demo=True)[0] is not None
    assert run(tmp_path, calls, demo=True)[0] is None


def test_after_a_configuration_that_failed_the_one_before_is_made_anew(
    tmp_path, calls, monkeypatch
):
    run(tmp_path, calls, demo=True)
    monkeypatch.setenv("FASTAMP_CUDA", "ON")

    def fail(command, **_):
        raise subprocess.CalledProcessError(1, command)

    with monkeypatch.context() as broken:
        broken.setattr(cmake_build.subprocess, "run", fail)
        with pytest.raises(subprocess.CalledProcessError):
            Build(tmp_path / "build", tmp_path / "package", demo=True).run()
    monkeypatch.delenv("FASTAMP_CUDA")
    assert run(tmp_path, calls, demo=True)[0] is not None


def test_the_package_alone_and_then_the_rest_are_one_configuration(tmp_path, calls):
    configured, targets = run(tmp_path, calls, tests="AUTO", package=True)
    assert "-DFASTAMP_BUILD_TESTS=AUTO" in configured
    assert targets == ["fastamp", "fastamp_python"]
    configured, targets = run(tmp_path, calls, tests="AUTO", gpu_tests=True)
    assert configured is None
    assert targets == ["fastamp", "fastamp_python", "fastamp_gpu_tests", "--", "-k", "0"]


def test_a_folder_with_tests_is_enough_where_they_are_built_if_possible(tmp_path, calls):
    run(tmp_path, calls, tests="ON")
    assert run(tmp_path, calls, tests="AUTO")[0] is None
    assert run(tmp_path, calls, tests="OFF")[0] is not None


def test_tests_that_were_left_out_are_named_and_looked_for_again(tmp_path, calls, capsys):
    run(tmp_path, calls, tests="AUTO", package=True)
    cache = tmp_path / "build" / "CMakeCache.txt"
    cache.write_text("A:INTERNAL=1\nFASTAMP_TESTS_LEFT_OUT:INTERNAL=no Catch2\nB:PATH=\n")
    assert cmake_build.tests_left_out(tmp_path / "build") == "no Catch2"
    assert run(tmp_path, calls, tests="AUTO")[0] is None
    assert capsys.readouterr().out == "left out: C++ tests: no Catch2\n"
    assert run(tmp_path, calls, tests="AUTO", package=True)[0] is not None


CONFIGURE = ["-S", str(cmake_build.ROOT), "-GNinja", OFF, "-DCMAKE_DISABLE_FIND_PACKAGE_Catch2=ON"]


@pytest.mark.parametrize(("tests", "status"), [("AUTO", 0), ("ON", 1)])
def test_without_catch2_only_auto_configures(tmp_path, tests, status):
    command = [cmake_build.find_tool("cmake"), *CONFIGURE, f"-DFASTAMP_BUILD_TESTS={tests}"]
    command += [f"-DPython3_EXECUTABLE={sys.executable}", "-DFASTAMP_BUILD_PYTHON=ON"]
    command += [f"-DCMAKE_MAKE_PROGRAM={cmake_build.find_tool('ninja')}", "-B", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == status, found.stderr
    if tests == "AUTO":
        assert cmake_build.tests_left_out(tmp_path) == (
            "Catch2 is not installed, and CATCH2_INCLUDE names no folder that has it"
        )
        assert not (tmp_path / "CTestTestfile.cmake").exists()
        ninja = (tmp_path / "build.ninja").read_text()
        assert "fastamp_test_core" not in ninja
        assert "libfastamp.so" in ninja
    else:
        assert "the C++ tests need Catch2" in found.stderr
