# SPDX-License-Identifier: Apache-2.0
"""tools/build_wheel.py and setup.py: what a wheel for several torches says of itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import build_wheel  # noqa: E402
import debian_python  # noqa: E402
import wheel_test  # noqa: E402

METADATA = """
import sys
from setuptools.build_meta import prepare_metadata_for_build_wheel
print(prepare_metadata_for_build_wheel(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("minors", "requirement"),
    [
        (("2.11",), "torch<2.12,>=2.11"),
        (("2.10", "2.11", "2.15"), "torch!=2.12.*,!=2.13.*,!=2.14.*,<2.16,>=2.10"),
        (("2.9", "2.10"), "torch<2.11,>=2.9"),
    ],
)
def test_the_wheel_asks_for_the_torches_that_it_has_parts_for(tmp_path, minors, requirement):
    for minor in minors:
        (tmp_path / "parts" / f"torch{minor}").mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-c", METADATA, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "FASTAMP_NATIVE_PARTS": str(tmp_path / "parts")},
        check=True,
        capture_output=True,
    )
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    assert f"Requires-Dist: {requirement}" in lines


def test_an_interpreter_is_what_it_is_called(tmp_path, monkeypatch):
    """One of the name asked for that is another version is passed over, and so is a broken one."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    (tmp_path / "python3.99").symlink_to(sys.executable)
    (tmp_path / f"python{own}").symlink_to(sys.executable)
    broken = tmp_path / "python3.98"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert build_wheel.find_python(own) == str(tmp_path / f"python{own}")
    assert build_wheel.find_python("3.99") is None
    assert build_wheel.find_python("3.98") is None


def test_an_interpreter_without_a_global_lock_is_passed_over(tmp_path, monkeypatch):
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    free = tmp_path / f"python{own}"
    free.write_text(
        f"#!{sys.executable}\nimport sys, sysconfig\n"
        "sysconfig.get_config_var = lambda name: int(name == 'Py_GIL_DISABLED')\n"
        "exec(sys.argv[2])\n"
    )
    free.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert build_wheel.find_python(own) is None


def test_pyenvs_newest_interpreter_is_taken(tmp_path, monkeypatch):
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    for patch in (2, 9, 10):
        folder = tmp_path / "versions" / f"{own}.{patch}" / "bin"
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    newest = tmp_path / "versions" / f"{own}.10" / "bin" / "python"
    assert build_wheel.find_python(own) == str(newest)


@pytest.mark.parametrize(
    ("status", "said", "has"),
    [
        (0, "", True),
        (1, "ERROR: No matching distribution found for torch==2.15.0", False),
        (1, "ERROR: connection refused", None),
    ],
)
def test_whether_a_torch_has_a_package_for_a_python_is_pips_word(monkeypatch, status, said, has):
    def run(command, **_):
        assert command[-1] == "torch==2.15.0"
        assert f"{sys.version_info.major}.{sys.version_info.minor}" in command
        return subprocess.CompletedProcess(command, status, "", said)

    monkeypatch.setattr(build_wheel.subprocess, "run", run)
    # check_output is a run, too.
    monkeypatch.setattr(
        build_wheel.subprocess,
        "check_output",
        lambda *_, **__: f"{sys.version_info.major}.{sys.version_info.minor}\n",
    )
    if has is None:
        with pytest.raises(subprocess.CalledProcessError):
            build_wheel.has_torch("2.15.0", sys.executable)
    else:
        assert build_wheel.has_torch("2.15.0", sys.executable) is has


def test_a_python_that_torch_has_no_package_for_is_named_and_left_out(monkeypatch, capsys):
    monkeypatch.setattr(build_wheel, "has_torch", lambda _, python: python != "/python3.10")
    assert build_wheel.pythons_with("2.15.0", ["/python3.10", "/python3.12"]) == ["/python3.12"]
    assert capsys.readouterr().out == "torch 2.15.0 has no package for /python3.10: left out\n"


HERE = f"-ffile-prefix-map={ROOT}=."
OPTIONS = (
    f"-DFASTAMP_CUDA=ON -DCMAKE_CXX_FLAGS={HERE} -DCMAKE_CUDA_FLAGS=-Xcompiler={HERE} "
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON"
)


@pytest.mark.parametrize(
    ("given", "cmake_args", "archs"),
    [
        ({}, OPTIONS, build_wheel.RELEASE_ARCHS),
        (
            {"CMAKE_ARGS": "-DA=1", "TORCH_CUDA_ARCH_LIST": "9.0"},
            f"{OPTIONS} -DA=1",
            "9.0",
        ),
    ],
)
def test_a_part_is_built_anew_with_settings_of_its_own(
    tmp_path, monkeypatch, given, cmake_args, archs
):
    """What an earlier version left is gone; the caller's settings are used and kept."""
    names = ("CMAKE_ARGS", "TORCH_CUDA_ARCH_LIST")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    stale = tmp_path / "torch2.99" / "lib" / "libfastamp_cuda.so.0.0"
    stale.parent.mkdir(parents=True)
    stale.touch()
    seen = {}

    class Build:
        def __init__(self, **options):
            self.options = options

        def run(self):
            seen.update(self.options, **{name: os.environ[name] for name in names})
            package = self.options["package_dir"]
            package.mkdir()
            shutil.copy(ROOT / "cmake" / "build_info.json.in", package / "build_info.json")

    monkeypatch.setattr(build_wheel, "PARTS", tmp_path)
    monkeypatch.setattr(build_wheel, "Build", Build)
    monkeypatch.setattr(build_wheel, "make_environment", lambda *_, **__: Path("/venv/python"))
    monkeypatch.setattr(build_wheel, "prepare_cuda", lambda *given: seen.update(prepared=given))
    monkeypatch.setattr(build_wheel, "pythons_with", lambda _, pythons: pythons[:1])
    build_wheel.build_part("2.99.0", ["/python3.12", "/python3.13"], "ON", 2)
    assert not stale.exists()
    assert (seen["CMAKE_ARGS"], seen["TORCH_CUDA_ARCH_LIST"]) == (cmake_args, archs)
    assert {name: os.environ[name] for name in names if name in os.environ} == given
    assert seen["prepared"] == (Path("/venv/python"), "ON")
    assert (seen["python"], seen["pythons"]) == ("/venv/python", ["/python3.12"])


def test_pythons_that_are_missing_are_named_and_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert build_wheel.find_pythons(["3.97", own]) == []
    assert capsys.readouterr().out == "Python 3.97: no interpreter here: left out\n"


def test_an_unpacked_interpreter_starts_with_the_libraries_beside_it(tmp_path):
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = tmp_path / "a root" / "usr"
    libraries, facts = folder / "lib" / "x86_64-linux-gnu", folder / "lib" / f"python{own}"
    headers = folder / "include" / f"python{own}"
    of_processor = folder / "include" / "x86_64-linux-gnu" / f"python{own}"
    for made in (folder / "bin", folder / "lib64", libraries, facts, headers, of_processor):
        made.mkdir(parents=True)
    (headers / "pyconfig.h").write_text(f"#include <x86_64-linux-gnu/python{own}/pyconfig.h>")
    (of_processor / "pyconfig.h").write_text("#define HAVE_FORK 1")
    shutil.copy(Path(sys.executable).resolve(), folder / "bin" / f"python{own}")
    own_maps = Path("/proc/self/maps").read_text().split()
    for name, place in (("libc.so.6", libraries), ("ld-linux-x86-64.so.2", folder / "lib64")):
        shutil.copy(next(path for path in own_maps if path.endswith(f"/{name}")), place)
    known = facts / "_sysconfigdata__linux_x86_64-linux-gnu.py"
    known.write_text("build_time_vars = {'WHEEL_PKG_DIR': '/usr/share/python-wheels/'}")
    debian_python.make_startable(tmp_path / "a root", own)
    ask = "import sys; print(sys.executable, open('/proc/self/maps').read())"
    python = folder / "bin" / f"python{own}"
    said = subprocess.run(
        [python, "-c", ask],
        env={"PYTHONHOME": sys.base_prefix},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert said.startswith(str(python))
    assert str(libraries / "libc.so.6") in said
    assert (headers / "pyconfig.h").read_text() == "#define HAVE_FORK 1"
    assert f"'WHEEL_PKG_DIR': '{folder}/share/python-wheels/'" in known.read_text()


def test_an_interpreter_that_debian_lacks_leaves_nothing_half_done(tmp_path, monkeypatch, capsys):
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\necho no package of that name\nexit 100\n")
    apt.chmod(0o755)
    (tmp_path / "dpkg-deb").symlink_to(apt)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(debian_python, "PYTHONS", tmp_path / "pythons")
    for _ in range(2):
        assert debian_python.provide("3.97") is None
        assert "no package of that name" in capsys.readouterr().out


def test_sizes_are_said_for_each_part(tmp_path, monkeypatch):
    monkeypatch.setattr(build_wheel, "ROOT", tmp_path)
    wheel = tmp_path / "fastamp.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("fastamp/", b"")  # Folders are entries, too.
        archive.writestr("fastamp/__init__.py", b"0" * 100_000)
        archive.writestr("fastamp/_native/torch2.11/lib/libfastamp.so.0.1", b"0" * 3_000_000)
        archive.writestr("fastamp/_native/torch2.11/_C.so", b"0" * 1_000_000)
    lines = list(build_wheel.describe(wheel))
    assert lines[0] == "fastamp.whl: 4.1 MB"
    assert lines[1:] == [
        "  Python and metadata: 0.1 MB, unpacked 0.1 MB",
        "  torch2.11: 4.0 MB, unpacked 4.0 MB",
    ]


def test_folders_of_this_machine_are_found_in_libraries(tmp_path):
    for name, path in (("good", "$ORIGIN/lib:$ORIGIN/../torch/lib"), ("bad", "$ORIGIN:/opt/x")):
        command = ["c++", "-shared", "-fPIC", "-x", "c++", "/dev/null", f"-Wl,-rpath,{path}"]
        subprocess.run([*command, "-o", tmp_path / f"{name}.so"], check=True)
    assert list(build_wheel.machine_paths(tmp_path)) == ["bad.so: /opt/x"]


def test_without_a_wheel_there_is_nothing_to_test(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel_test, "DIST", tmp_path)
    with pytest.raises(SystemExit, match="make wheel builds it"):
        wheel_test.newest_wheel()


def test_each_torch_is_tested_with_each_python(tmp_path, monkeypatch, capsys):
    (tmp_path / "fastamp-0-py3-none-any.whl").touch()
    monkeypatch.setattr(wheel_test, "DIST", tmp_path)
    monkeypatch.setattr(wheel_test, "WORK", tmp_path)
    monkeypatch.setattr(wheel_test, "find_pythons", lambda names: [f"/python{n}" for n in names])
    monkeypatch.setattr(build_wheel, "has_torch", lambda torch, _: torch != "2.9.0")
    seen = []

    def install(_folder, interpreter, torch, _wheel):
        seen.append((torch, interpreter))
        return f"Python of {interpreter}"

    monkeypatch.setattr(wheel_test, "install", install)
    for name in ("train", "drop_in", "consume"):
        monkeypatch.setattr(wheel_test, name, lambda _: "ok")
    torches = ["--torch", "2.10.0", "--torch", "2.9.0", "--torch", "2.11.0"]
    assert wheel_test.main([*torches, "--python", "3.12"]) == 0
    own = sys.executable
    assert seen == [
        (torch, python) for torch in ("2.10.0", "2.11.0") for python in (own, "/python3.12")
    ]
    assert "| 2.10.0 | install | 0 | Python of /python3.12 |" in capsys.readouterr().out


def test_what_fails_with_one_torch_is_a_failed_row(tmp_path, monkeypatch, capsys):
    """A command that fails says so in the table and in the exit status; the rest still runs."""
    wheel = tmp_path / "fastamp-0-py3-none-any.whl"
    wheel.touch()
    monkeypatch.setattr(wheel_test, "DIST", tmp_path)
    monkeypatch.setattr(wheel_test, "WORK", tmp_path)
    monkeypatch.setattr(wheel_test, "install", lambda *_: "built for torch 2.11.0, CPU alone")
    monkeypatch.setattr(wheel_test, "train", lambda _: "loss")
    monkeypatch.setattr(wheel_test, "drop_in", lambda _: wheel_test.call(["false"]))
    monkeypatch.setattr(wheel_test, "consume", lambda _: "fastamp 0.1.0, torch 2.11.0")
    monkeypatch.setattr(build_wheel, "has_torch", lambda *_: True)
    assert wheel_test.main(["--torch", "2.11.0"]) == 1
    out = capsys.readouterr().out
    assert "| 2.11.0 | drop-in | 0 | failed |" in out
    assert "| 2.11.0 | C++ program | 0 | fastamp 0.1.0, torch 2.11.0 |" in out


@pytest.mark.parametrize(
    ("said", "result"),
    [
        ("3.12.1 2.11.0 13.0\n\n", "Python 3.12.1, built for torch 2.11.0, CUDA 13.0"),
        ("3.12.1 2.10.0 \n\n", "Python 3.12.1, built for torch 2.10.0, CPU alone"),
        ("3.12.1 2.11.0 13.0\nno such file\n", None),
    ],
)
def test_code_for_cuda_that_does_not_open_is_a_failed_installation(
    tmp_path, monkeypatch, said, result
):
    monkeypatch.setattr(wheel_test, "call", lambda command, *_: said if "-c" in command else "")
    if result is None:
        with pytest.raises(RuntimeError, match="cannot be used: no such file"):
            wheel_test.install(tmp_path, sys.executable, "2.11.0", tmp_path)
    else:
        assert wheel_test.install(tmp_path, sys.executable, "2.11.0", tmp_path) == result


@pytest.mark.parametrize(
    ("fp16", "complaint"), [(2.01, None), (2.2, "fp16 2.200"), (float("nan"), "fp16 nan")]
)
def test_a_precision_that_does_not_learn_is_a_failure(tmp_path, monkeypatch, fp16, complaint):
    modes = [("fp32", 2.0), ("fp16", fp16)]
    rows = [{"mode": mode, "losses": {"1": 2.3}, "final_loss": loss} for mode, loss in modes]

    def call(command):
        if "--json" in command:
            command[-1].write_text(json.dumps({"rows": rows}))

    monkeypatch.setattr(wheel_test, "call", call)
    if complaint is None:
        assert wheel_test.train(tmp_path) == "loss 2.300 -> fp32 2.000, fp16 2.010"
    else:
        with pytest.raises(RuntimeError, match=complaint):
            wheel_test.train(tmp_path)


def test_a_file_that_names_the_folder_of_the_checkout_is_found(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libfastamp.so").write_bytes(b"\0Exception raised at ./src/a.cpp\0")
    (tmp_path / "build_info.json").write_text("{}")
    assert list(build_wheel.names_of_this_folder(tmp_path)) == []
    (tmp_path / "lib" / "libfastamp.so").write_bytes(f"\0{ROOT}/src/a.cpp\0".encode())
    assert list(build_wheel.names_of_this_folder(tmp_path)) == [f"lib/libfastamp.so: {ROOT}"]


def test_all_files_of_a_wheel_have_the_time_of_the_commit():
    asked = subprocess.check_output(["git", "-C", ROOT, "log", "-1", "--format=%ct"], text=True)
    assert build_wheel.commit_time() == asked.strip()
