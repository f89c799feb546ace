# SPDX-License-Identifier: Apache-2.0
"""Builds one wheel with the native part for several versions of torch and Python.

build_wheel.py --torch 2.11.0 --torch 2.15.0 --python 3.11 --python 3.12: the library is built once
for each torch, the module once for each torch and Python. What is up to date is not built again, so
a run that was stopped goes on. auditwheel, in an environment of its own, finds the platform's tag
and refuses a wheel that needs more of a system than torch, CUDA's runtime and the C++ runtime. The
bytes depend on the commit and on the tools, not on time and place. A bill of materials lies beside
the wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import debian_python
from cmake_build import ROOT, Build
from compat import make_environment, prepare_cuda, run
from setup_venv import read_pyproject

WORK = ROOT / "build" / "wheel"
PARTS = WORK / "parts"
DIST = ROOT / "dist"
# From fastamp/_native/torchX.Y to the folder of all packages.
SITE_PACKAGES = "../../.."
# Of torch's wheels for CUDA 13, which also compile for 8.6: that runs the code for 8.0. The GPU of
# this machine says nothing. From the last one, newer GPUs compile what they need.
RELEASE_ARCHS = "7.5 8.0 9.0 10.0 12.0+PTX"
# They come with torch, and its copies are the ones to be used.
OF_TORCH = ("libtorch*.so", "libc10*.so", "libcudart*.so*", "libgomp*.so*")


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Says what is done, and then how many minutes it took."""
    print(f"{what} ...", flush=True)
    begin = time.monotonic()
    yield
    print(f"{what}: {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)


def minor_of(torch: str) -> str:
    """Returns "2.11" for "2.11.0"."""
    return ".".join(torch.split(".")[:2])


def numbers(path: Path) -> list[int]:
    """Returns the numbers in a path, by which 3.12.10 comes after 3.12.9."""
    return [int(number) for number in re.findall(r"\d+", str(path))]


def find_python(name: str) -> str | None:
    """Returns the interpreter for "3.12": from the PATH, else pyenv's newest; None without one.

    One without a global lock is another interpreter, with an ABI of its own: it is passed over.
    """
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted(versions.glob(f"{name}.*/bin/python"), key=numbers)
    places = [shutil.which(f"python{name}"), *map(str, reversed(found))]
    ask = (
        "import sys, sysconfig; free = sysconfig.get_config_var('Py_GIL_DISABLED');"
        f"sys.exit(bool(free) or '%d.%d' % sys.version_info[:2] != {name!r})"
    )
    for place in filter(None, places):
        if subprocess.run([place, "-c", ask], check=False, capture_output=True).returncode == 0:
            return place
    return None


def find_pythons(names: Sequence[str]) -> list[str]:
    """Returns interpreters, without that of the build itself, and says which are missing.

    One that this machine lacks is unpacked from Debian, if that has it.
    """
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {
        name: find_python(name) or debian_python.provide(name) for name in names if name != own
    }
    for name, place in found.items():
        print(f"Python {name}: {place or 'no interpreter here: left out'}", flush=True)
    return [place for place in found.values() if place is not None]


def has_torch(torch: str, interpreter: str) -> bool:
    """Returns whether there is a package of a torch for an interpreter's version of Python.

    Raises:
        subprocess.CalledProcessError: It could not be found out; with pip's output.
    """
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    python = subprocess.check_output([interpreter, "-c", ask], text=True).strip()
    # Our own pip, since the interpreter may have none. It downloads a page and no package.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run"]
    command += ["--no-deps", "--ignore-installed", "--target", str(WORK / "never-written")]
    command += ["--only-binary", ":all:", "--python-version", python, f"torch=={torch}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return True
    if "No matching distribution found" in done.stderr:
        return False
    print(done.stderr, file=sys.stderr, flush=True)
    raise subprocess.CalledProcessError(done.returncode, command)


def pythons_with(torch: str, pythons: Sequence[str]) -> list[str]:
    """Returns the interpreters that a torch has a package for, and says which it has none for."""
    found = [python for python in pythons if has_torch(torch, python)]
    for python in pythons:
        if python not in found:
            print(f"torch {torch} has no package for {python}: left out", flush=True)
    return found


def commit_time() -> str:
    """Returns when the commit was made, in seconds since 1970: the time of all files of a wheel."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return subprocess.check_output(command, text=True).strip()


@contextmanager
def build_settings(cuda: str) -> Iterator[None]:
    """Sets what CMake is to do, beside what the caller's environment says, which wins."""
    given = {name: os.environ.get(name) for name in ("CMAKE_ARGS", "TORCH_CUDA_ARCH_LIST")}
    # Texts of errors hold names of files: those of the sources, not of this machine's folders.
    here = f"-ffile-prefix-map={ROOT}=."
    options = f"-DFASTAMP_CUDA={cuda} -DCMAKE_CXX_FLAGS={here} -DCMAKE_CUDA_FLAGS=-Xcompiler={here}"
    # Nor their names where libraries are looked for: build IDs are made of all that is linked.
    options += " -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON"
    os.environ["CMAKE_ARGS"] = f"{options} {given['CMAKE_ARGS'] or ''}".strip()
    os.environ["TORCH_CUDA_ARCH_LIST"] = given["TORCH_CUDA_ARCH_LIST"] or RELEASE_ARCHS
    try:
        yield
    finally:
        for name, value in given.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def build_part(torch: str, pythons: Sequence[str], cuda: str, jobs: int) -> None:
    """Builds the native part for a torch into PARTS.

    Our own torch is used where it is, others get an environment each. The build folder is none of
    `make build`: that one is for this machine's GPU.
    """
    package = PARTS / f"torch{minor_of(torch)}"
    own = minor_of(version("torch")) == minor_of(torch)
    if own:
        python = Path(sys.executable)
    else:
        python = make_environment(WORK / torch / "venv", torch, extras=("build",))
    if not own or sys.prefix != sys.base_prefix:  # Only into an environment that make has made.
        prepare_cuda(python, "OFF" if cuda == "OFF" else "ON")  # Installs what there is.
    shutil.rmtree(package, ignore_errors=True)  # What an earlier version had is not to be packed.
    with build_settings(cuda):
        Build(
            build_dir=WORK / torch / "make",
            package_dir=package,
            package=True,
            site_packages=SITE_PACKAGES,
            jobs=jobs,
            python=str(python),
            pythons=pythons_with(torch, pythons),
        ).run()
    for library in package.rglob("*.so*"):
        subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
    info = json.loads((package / "build_info.json").read_text(encoding="utf-8"))
    cuda_code = "without CUDA"
    if info["cuda_version"]:
        cuda_code = f"with CUDA {info['cuda_version']} for {info['cuda_archs']}"
    modules = ", ".join(sorted(path.name.split("-")[1] for path in package.glob("_C.*")))
    print(f"torch {info['torch_version']}: {cuda_code}, Python {modules}", flush=True)


def machine_paths(folder: Path) -> Iterator[str]:
    """Yields the RPATHs below a folder that lead to folders of this machine, not to neighbours."""
    for library in sorted(folder.rglob("*.so*")):
        dynamic = subprocess.check_output(["readelf", "-d", str(library)], text=True)
        for path in re.findall(r"(?:RUNPATH|RPATH).*\[(.*)\]", dynamic):
            yield from (
                f"{library.name}: {entry}"
                for entry in path.split(":")
                if not entry.startswith("$ORIGIN")
            )


def names_of_this_folder(folder: Path) -> Iterator[str]:
    """Yields the files below a folder whose bytes name the folder of this checkout."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and str(ROOT).encode() in file.read_bytes():
            yield f"{file.relative_to(folder)}: {ROOT}"


def pack() -> Path:
    """Returns a wheel of the package and all parts, for this machine's platform alone.

    Raises:
        SystemExit: A file names a folder of this machine.
    """
    if wrong := [*machine_paths(PARTS), *names_of_this_folder(PARTS)]:
        raise SystemExit(f"fastamp: the wheel would name folders of this machine: {wrong}")
    folder = WORK / "packed"
    shutil.rmtree(folder, ignore_errors=True)
    command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    run(Path(sys.executable), *command, str(ROOT), FASTAMP_NATIVE_PARTS=str(PARTS))
    (wheel,) = folder.glob("fastamp-*.whl")
    return wheel


def audit(wheel: Path) -> Path:
    """Returns the wheel in DIST, with the tag of the oldest platform that it runs on.

    Raises:
        SystemExit: It needs a library that neither torch nor every such platform has.
    """
    folder = WORK / "audit"
    python = folder / "bin" / "python"
    wanted = read_pyproject()["project"]["optional-dependencies"]["wheel"]
    stamp = folder / "fastamp_packages.txt"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != "\n".join(wanted):
        venv.create(folder, with_pip=True)
        run(python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *wanted)
        stamp.write_text("\n".join(wanted), encoding="utf-8")
    done = WORK / "audited"
    shutil.rmtree(done, ignore_errors=True)
    exclude = [word for name in OF_TORCH for word in ("--exclude", name)]
    tools = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    command = ("-m", "auditwheel", "repair", *exclude, "-w", str(done), str(wheel))
    run(python, *command, PATH=tools)
    (audited,) = done.glob("fastamp-*.whl")
    with zipfile.ZipFile(audited) as archive:
        added = [name for name in archive.namelist() if name.startswith("fastamp.libs/")]
    if added:
        raise SystemExit(f"fastamp: the wheel needs libraries that are not torch's: {added}")
    DIST.mkdir(exist_ok=True)
    wheel = Path(shutil.move(audited, DIST / audited.name))
    run(python, str(ROOT / "tools" / "wheel_sbom.py"), str(wheel))
    return wheel


def describe(wheel: Path) -> Iterator[str]:
    """Yields the sizes of a wheel and of its parts."""
    yield f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB"
    sizes: dict[str, list[int]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.is_dir():
                continue
            folders = entry.filename.split("/")
            name = folders[2] if folders[1] == "_native" else "Python and metadata"
            total = sizes.setdefault(name, [0, 0])
            total[0] += entry.compress_size
            total[1] += entry.file_size
    for name, (packed, unpacked) in sorted(sizes.items()):
        yield f"  {name}: {packed / 1e6:.1f} MB, unpacked {unpacked / 1e6:.1f} MB"


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds all parts and the wheel."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", action="append", required=True, help="e.g. 2.15.0; repeatable")
    parser.add_argument("--python", action="append", default=[], help="e.g. 3.12; repeatable")
    parser.add_argument("--cuda", choices=("AUTO", "ON", "OFF"), default="AUTO")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit_time())  # read by setuptools and auditwheel
    pythons = find_pythons(options.python)
    wanted = {f"torch{minor_of(torch)}" for torch in options.torch}
    for part in PARTS.glob("*"):
        if part.name not in wanted:
            shutil.rmtree(part)
    for torch in options.torch:
        with timed(f"torch {torch}"):
            build_part(torch, pythons, options.cuda, options.jobs)
    with timed("wheel"):
        wheel = audit(pack())
    print("\n".join(describe(wheel)), flush=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"fastamp: wheel failed: {error}") from None
