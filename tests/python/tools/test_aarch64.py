# SPDX-License-Identifier: Apache-2.0
"""tools/aarch64.py: what is unpacked, built and run, by tools that only say what they are given."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import aarch64
import debian_python

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Folders of its own, and an environment that is left as it was."""
    for name in ("CMAKE_ARGS", "OMP_WAIT_POLICY", "QEMU_CPU"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(aarch64, "WORK", tmp_path)
    monkeypatch.setattr(aarch64, "SITE", tmp_path / "site")
    monkeypatch.setattr(aarch64, "ROOT", tmp_path)
    return tmp_path


def test_packages_are_those_of_the_other_processor_and_unpacked_once(work, monkeypatch):
    asked = []
    pins = ["torch==2.99.0"]
    extras = {"project": {"optional-dependencies": {"test": pins}}}
    monkeypatch.setattr(aarch64, "run", lambda _, *words: asked.append(words))
    monkeypatch.setattr(aarch64, "read_pyproject", lambda: extras)
    for _ in range(2):
        aarch64.install_packages()
    (words,) = asked
    platforms = {words[i + 1] for i, word in enumerate(words) if word == "--platform"}
    assert {"manylinux2014_aarch64", "manylinux_2_28_aarch64"} < platforms
    assert all(name.endswith("_aarch64") for name in platforms)
    assert words[-2:] == (aarch64.PINNED_TORCH, "torch==2.99.0")
    assert str(work / "site") in words
    (work / "site").mkdir()
    (work / "site" / "old.py").touch()
    pins.append("numpy==2.4.6")
    aarch64.install_packages()
    assert len(asked) == 2
    assert not (work / "site" / "old.py").exists()


def test_compilers_of_this_machine_lie_beside_libraries_of_the_other(work, monkeypatch):
    def fill(folder, text, *names):
        for name in names:
            file = folder / "nvidia" / "cu13" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    asked = []

    def pip(folder, package):
        asked.append(package)
        fill(folder, "here", "bin/nvcc", "lib/libcudart.so.13")

    about = work / "site" / "cuda_toolkit-13.0.2.dist-info" / "METADATA"
    fill(work / "site", "there", "lib/libcudart.so.13")
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: cuda-toolkit\nVersion: 13.0.2\n")
    monkeypatch.setattr(aarch64, "pip", pip)
    for _ in range(2):
        aarch64.install_nvcc()
    assert asked == ["cuda-toolkit[nvcc,crt,nvvm,cccl]==13.0.2"]
    toolkit = work / "site" / "nvidia" / "cu13"
    assert (toolkit / "bin" / "nvcc").read_text() == "here"
    assert (toolkit / "lib" / "libcudart.so.13").read_text() == "there"


def test_the_package_is_built_beside_its_torch(work, monkeypatch):
    built = {}

    class Build:
        def __init__(self, build_dir, package_dir, **options):
            built.update(options, build_dir=build_dir, package_dir=package_dir)

        def run(self):
            built["arguments"] = os.environ["CMAKE_ARGS"].split()

    source = work / "python" / "fastamp"
    (source / "lib").mkdir(parents=True)
    for name in ("__init__.py", "_C.cpython-311-x86_64-linux-gnu.so", "build_info.json"):
        (source / name).touch()
    monkeypatch.setattr(aarch64, "Build", Build)
    monkeypatch.setenv("CMAKE_ARGS", "-DFASTAMP_UNITY_BUILD=OFF")
    aarch64.build("/pythons/root/usr/bin/python3.11", "OFF", 3)
    assert [path.name for path in (work / "site" / "fastamp").iterdir()] == ["__init__.py"]
    assert built["package_dir"] == work / "site" / "fastamp"
    assert (built["tests"], built["jobs"]) == ("ON", 3)
    assert "-DFASTAMP_AARCH64_ROOT=/pythons/root" in built["arguments"]
    assert f"-DCMAKE_PREFIX_PATH={work}/site/torch" in built["arguments"]
    assert built["arguments"][-1] == "-DFASTAMP_UNITY_BUILD=OFF"


@pytest.mark.parametrize(("cpp", "python", "status"), [(0, 0, 0), (8, 0, 1), (0, 1, 1), (8, 1, 1)])
def test_both_languages_are_tested_and_a_failure_of_either_is_one(
    work, monkeypatch, cpp, python, status
):
    ran = []

    def run(interpreter, *words, **_):
        ran.append((str(interpreter), words[1]))
        return python

    monkeypatch.setattr(debian_python, "provide", lambda *_: "/python")
    for name in ("install_packages", "build"):
        monkeypatch.setattr(aarch64, name, lambda *_: None)
    monkeypatch.setattr(subprocess, "call", lambda words: ran.append(words) or cpp)
    monkeypatch.setattr(aarch64, "run", run)
    assert aarch64.main([]) == status
    assert ran[0][0].endswith("ctest")
    assert ran[1] == ("/python", "pytest")
    assert work.is_dir()


@pytest.mark.usefixtures("work")
def test_without_a_python_for_it_nothing_is_done(monkeypatch):
    monkeypatch.setattr(debian_python, "provide", lambda *_: None)
    with pytest.raises(SystemExit, match="no Python for aarch64"):
        aarch64.main([])


def test_the_tests_that_are_chosen_exist():
    assert [name for name in aarch64.SMOKE if not (ROOT / name).exists()] == []


def test_the_other_processors_python_is_started_by_the_emulator(tmp_path, monkeypatch):
    """apt is asked for packages of that processor, in a state that is not this machine's."""
    tools = tmp_path / "tools"
    tools.mkdir()
    real = tmp_path / "pythons" / "3.97-arm64" / "root" / "usr" / "bin" / "python3.97"
    said = tmp_path / "said"
    programs = {
        "apt-get": f'echo "$@" >> "{said}"; echo http://mirror/debian',
        "dpkg-deb": "exit 0",
        "emulator": 'echo "emulated: $@"',
    }
    for name, text in programs.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(debian_python, "PYTHONS", tmp_path / "pythons")
    download = debian_python.download

    def download_and_place(name, folder, debian):
        download(name, folder, debian)
        real.parent.mkdir(parents=True)
        real.touch()

    monkeypatch.setattr(debian_python, "download", download_and_place)
    debian = debian_python.Debian("suite", "arm64", "emulator", ("libmore",))
    python = debian_python.provide("3.97", debian)
    assert python == str(real)
    lines = said.read_text().splitlines()
    assert all("APT::Architecture=arm64" in line for line in lines[1:])
    assert "python3.97-venv libpython3.97-dev libmore" in lines[-1]
    source = tmp_path / "pythons" / "3.97-arm64" / "sources.list"
    assert source.read_text().endswith("http://mirror/debian suite main\n")
    started = subprocess.check_output([python, "-c", "1"], text=True)
    root = real.parents[2]
    assert started == f"emulated: -0 {python} -L {root} {real}.real -c 1\n"
