# SPDX-License-Identifier: Apache-2.0
"""What C++ projects link against: file and symbol versions, pkg-config, FetchContent, packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import fastamp
from packaging_tools import (
    ABI,
    LIBRARY,
    ROOT,
    TORCH_PREFIX,
    build_and_run,
    call,
    configure,
    find_tool,
)

PACKAGE = Path(fastamp.__file__).parent
BUILD = Path(os.environ.get("FASTAMP_BUILD_DIR", ROOT / "build" / "make"))
GUIDE = (ROOT / "docs" / "cpp.md").read_text(encoding="utf-8")
needs_pkg_config = pytest.mark.skipif(
    shutil.which("pkg-config") is None, reason="pkg-config is not installed"
)


def exported() -> list[tuple[str, str]]:
    """(kind, demangled name) of what the library exports."""
    command = ["nm", "-D", "-C", "--with-symbol-versions", "--defined-only"]
    text = subprocess.check_output([*command, PACKAGE / "lib" / LIBRARY], text=True)
    return [(line.split(" ", 2)[1], line.split(" ", 2)[2]) for line in text.splitlines()]


def test_the_file_is_named_by_the_abi_and_nothing_needs_another_name():
    library = subprocess.check_output(["readelf", "-d", PACKAGE / "lib" / LIBRARY], text=True)
    assert re.findall(r"SONAME.*\[(.*)\]", library) == [LIBRARY]
    module = subprocess.check_output(["readelf", "-d", fastamp._C.__file__], text=True)
    assert LIBRARY in re.findall(r"NEEDED.*\[(.*)\]", module)


def test_symbols_of_fastamp_have_the_version_of_the_abi_and_others_have_none():
    own = [name for _, name in exported() if re.match(r"([\w-]+ )*(for |to )?fastamp(::|_)", name)]
    assert len(own) > 300
    assert [name for name in own if not name.endswith(f"@@FASTAMP_{ABI}")] == []
    others = [name for _, name in exported() if name not in own]
    assert [name for name in others if "@" in name and not name.startswith("FASTAMP")] == []


def test_the_standard_librarys_templates_over_private_types_stay_inside():
    names = [name for _, name in exported()]
    assert [n for n in names if re.match(r"(\w+ )*std::.*fastamp::", n)] == []


@needs_pkg_config
def test_pkg_config_is_all_that_a_compiler_needs(tmp_path: Path):
    flags = subprocess.check_output(
        ["pkg-config", "--cflags", "--libs", "fastamp"],
        text=True,
        env=os.environ | {"PKG_CONFIG_PATH": str(PACKAGE / "lib" / "pkgconfig")},
    ).split()
    source = ROOT / "tests" / "consumer" / "main.cpp"
    program = tmp_path / "consumer"
    status, output = call("c++", source, *flags, "-o", program)
    assert status == 0, output
    status, output = call(program)
    assert (status, output.split(",")[0]) == (0, f"fastamp {fastamp.__version__}")


@needs_pkg_config
def test_pkg_config_knows_version_and_another_torch():
    environment = os.environ | {"PKG_CONFIG_PATH": str(PACKAGE / "lib" / "pkgconfig")}

    def ask(*options: str) -> str:
        command = ["pkg-config", *options, "fastamp"]
        return subprocess.check_output(command, text=True, env=environment)

    assert ask("--modversion").strip() == fastamp.__version__
    flags = ask("--cflags", "--libs", "--define-variable=torch=/opt/libtorch")
    assert "/opt/libtorch/include" in flags
    assert "-L/opt/libtorch/lib" in flags


def test_a_program_of_another_abi_is_refused_when_it_is_loaded(tmp_path: Path):
    """A library under the name of fastamp without our version stands for one of another ABI."""
    other, versions = tmp_path / LIBRARY, tmp_path / "symbols.map"
    versions.write_text("FASTAMP_0.0 { global: *; };\n", encoding="utf-8")
    status, output = call(
        *("c++", "-shared", "-fPIC", "-x", "c++", "/dev/null", "-o", other),
        *(f"-Wl,-soname,{LIBRARY}", f"-Wl,--version-script={versions}"),
    )
    assert status == 0, output
    run = subprocess.run(
        ["python3", "-c", f"import ctypes; ctypes.CDLL({fastamp._C.__file__!r})"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"LD_PRELOAD": str(other)},
    )
    assert run.returncode != 0
    assert f"version `FASTAMP_{ABI}' not found" in run.stderr


def cmake_block(start: str) -> str:
    (found,) = re.findall(rf"^```cmake\n({start}.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    return found


@pytest.mark.slow
def test_the_guides_fetch_content_configures(tmp_path: Path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(p LANGUAGES CXX)\n"
        + cmake_block(r"include\(FetchContent\)")
    )
    (tmp_path / "main.cpp").write_text("int main() {}\n")
    status, output = call(
        *(find_tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build", "-GNinja"),
        f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
        f"-DFETCHCONTENT_SOURCE_DIR_FASTAMP={ROOT}",  # nothing is downloaded
        *(f"-DCMAKE_PREFIX_PATH={TORCH_PREFIX}", "-DFASTAMP_CUDA=OFF"),
    )
    assert status == 0, output
    ninja = (tmp_path / "build" / "build.ninja").read_text(encoding="utf-8")
    assert LIBRARY in ninja
    assert "fastamp_test_core" not in ninja


@pytest.mark.skipif(not fastamp.build_info()["cuda_version"], reason="built without CUDA")
def test_the_two_libraries_stay_together_in_a_project_with_folders_of_its_own(tmp_path: Path):
    """The one opens the other by its name, in its own folder."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(p LANGUAGES CXX)\n"
        f"add_subdirectory({ROOT} fastamp)\n"
    )
    status, output = call(
        *(find_tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build", "-GNinja"),
        f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
        *(f"-DCMAKE_PREFIX_PATH={TORCH_PREFIX}", "-DFASTAMP_CUDA=ON", "-DCMAKE_UNITY_BUILD=ON"),
        *("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_DEBUG_POSTFIX=-debug"),
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={tmp_path}/build/out",
    )
    assert status == 0, output
    ninja = (tmp_path / "build" / "build.ninja").read_text(encoding="utf-8")
    linked = set(re.findall(r"^build (\S*libfastamp\S*\.so\.[\d.]+)[ :]", ninja, re.MULTILINE))
    assert linked == {f"out/libfastamp-debug.so.{ABI}", f"out/libfastamp_cuda.so.{ABI}"}
    assert "Unity" not in "".join(re.findall(r"fastamp_cuda\.dir/\S+", ninja))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
def test_the_debian_package_serves_a_program(tmp_path: Path):
    status, output = call(
        find_tool("cpack"), "--config", BUILD / "CPackConfig.cmake", "-G", "DEB", "-B", tmp_path
    )
    assert status == 0, output
    (package,) = tmp_path.glob("libfastamp-dev_*.deb")
    assert f"_{fastamp.__version__}_" in package.name
    root = tmp_path / "root"
    status, output = call("dpkg-deb", "-x", package, root)
    assert status == 0, output
    names = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert all(name.startswith("usr/") for name in names)
    assert {f"usr/lib/{LIBRARY}", "usr/include/fastamp/fastamp.h"} <= names
    assert not [name for name in names if name.endswith(".py") or "_C." in name]
    prefixes = [TORCH_PREFIX, root / "usr" / "share" / "cmake"]
    status, output = configure(tmp_path / "build", prefixes)
    assert status == 0, output
    status, output = build_and_run(tmp_path / "build")
    assert (status, output.split(",")[0]) == (0, f"fastamp {fastamp.__version__}")
    linked = subprocess.check_output(["ldd", tmp_path / "build" / "consumer"], text=True)
    assert f"{root}/usr/lib/{LIBRARY}" in linked
