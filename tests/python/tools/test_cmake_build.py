# SPDX-License-Identifier: Apache-2.0
"""What each kind of build configures: nobody waits for parts that he did not ask for."""

import pytest

import cmake_build
from cmake_build import Build

OFF = "-DFASTAMP_CUDA=OFF"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine without a GPU and without wishes in the environment."""
    monkeypatch.setattr(cmake_build, "has_gpu", lambda: False)
    for name in ("FASTAMP_CUDA", "CMAKE_ARGS", "TORCH_CUDA_ARCH_LIST", "CMAKE_BUILD_TYPE"):
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
    for kind in ({"tests": True}, {}):
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
    for kind in ({"tests": True}, {"demo": True}):
        configured = run(tmp_path, calls, **kind)[0]
        assert configured is None or cmake_build.cuda_option(configured) == wish
    assert capsys.readouterr().out == ""


def test_demo_turns_no_folder_back(tmp_path, calls, monkeypatch):
    run(tmp_path, calls, tests=True)
    assert run(tmp_path, calls, demo=True) == (None, ["fastamp", "fastamp_python", "digits"])
    monkeypatch.setenv("FASTAMP_CUDA", "ON")
    run(tmp_path, calls, tests=True)
    monkeypatch.delenv("FASTAMP_CUDA")
    assert run(tmp_path, calls, demo=True)[0] is None


def test_full_build_after_the_demo_adds_tests_and_cuda(tmp_path, calls):
    run(tmp_path, calls, demo=True)
    configured = run(tmp_path, calls, tests=True)[0]
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
