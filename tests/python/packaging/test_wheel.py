# SPDX-License-Identifier: Apache-2.0
"""The wheel: what is in it, that it can be moved, and that C++ programs can use it."""

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import version

import pytest
import torch

import fastamp
from packaging_tools import LIBRARY, ROOT, TORCH_DIR, TORCH_PREFIX, build_and_run, call, configure

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # compiles what `make build` has not
    pytest.mark.skipif(
        int(version("setuptools").split(".")[0]) < 77,
        reason="pyproject.toml needs setuptools >= 77",
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of Python packages with the wheel's content beside torch."""
    dist = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    # The folder and options of `make build`, so that nothing is compiled twice.
    default = {"FASTAMP_BUILD_DIR": str(ROOT / "build" / "make"), "FASTAMP_BUILD_TESTS": "1"}
    subprocess.run([*pip, "-w", dist, ROOT], check=True, env={**default, **os.environ})
    (wheel,) = dist.glob("fastamp-*.whl")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in ("torch", "nvidia"):
        if (TORCH_DIR.parent / name).exists():
            (site / name).symlink_to(TORCH_DIR.parent / name)
    return site


def libraries(site):
    (module,) = (site / "fastamp").glob("_C.*.so")
    others = sorted((site / "fastamp" / "lib").glob("libfastamp_cuda.so.*"))
    return [site / "fastamp" / "lib" / LIBRARY, module, *others]


def test_wheel_holds_the_package_and_the_cplusplus_side(site):
    package = site / "fastamp"
    for name in (
        "__init__.py",
        "_C.pyi",
        "py.typed",
        "build_info.json",
        "include/fastamp/fastamp.h",
        "include/fastamp/version.h",
        "share/cmake/fastamp/fastampConfig.cmake",
        "lib/pkgconfig/fastamp.pc",
    ):
        assert (package / name).is_file(), name
    names = {path.name for path in package.rglob("*.so*")}
    wanted = {path.name for path in libraries(site)}
    assert names == wanted
    assert len(wanted) == (3 if fastamp.build_info()["cuda_version"] else 2)


def test_wheel_pins_the_minor_version_of_torch(site):
    (metadata,) = site.glob("fastamp-*.dist-info/METADATA")
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"Requires-Dist: torch=={minor}.*" in metadata.read_text()


def test_wheel_names_no_folder_of_the_machine_that_built_it(site):
    for library in libraries(site):
        dynamic = subprocess.check_output(["readelf", "-d", library], text=True)
        (runpath,) = re.findall(r"(?:RUNPATH|RPATH).*\[(.*)\]", dynamic)
        assert all(entry.startswith("$ORIGIN") for entry in runpath.split(":")), runpath


def test_library_never_needs_python(site):
    dynamic = subprocess.check_output(["readelf", "-d", libraries(site)[0]], text=True)
    assert not [name for name in re.findall(r"NEEDED.*\[(.*)\]", dynamic) if "python" in name]


def test_library_exports_only_its_own_namespace(site):
    command = ["nm", "-D", "-C", "--defined-only", libraries(site)[0]]
    symbols = subprocess.check_output(command, text=True).splitlines()
    # Weak symbols are templates and inline functions of the headers used; A is the version's name.
    own = [line.split(" ", 2)[2] for line in symbols if line.split(" ", 2)[1] not in "wWVuA"]
    assert own
    foreign = [name for name in own if not re.search(r"\bfastamp", name)]
    assert foreign == []


def test_wheel_imports_from_where_it_is_unpacked(site):
    code = "import fastamp; print(fastamp.__file__, fastamp.build_info()['version'])"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    output = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert output.split() == [str(site / "fastamp" / "__init__.py"), fastamp.__version__]


def test_wheel_serves_a_cplusplus_program(site, tmp_path):
    prefixes = [TORCH_PREFIX, site / "fastamp" / "share" / "cmake"]
    status, output = configure(tmp_path, prefixes)
    assert status == 0, output
    status, output = build_and_run(tmp_path)
    assert status == 0, output
    assert f"fastamp {fastamp.__version__}" in output
    linked = call("ldd", tmp_path / "consumer")[1]
    assert str(site / "fastamp" / "lib" / LIBRARY) in linked
