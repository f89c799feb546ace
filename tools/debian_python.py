# SPDX-License-Identifier: Apache-2.0
"""Unpacks a Python that this machine lacks from Debian into build/pythons.

apt, with a state of its own, finds its packages and what they need down to the C library, and
checks signatures and sums. Nothing is installed: a script in the interpreter's place starts it with
the C library that it was built for, by an emulator if it is for another processor. 35 MB are
downloaded for each version.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cmake_build import ROOT

PYTHONS = ROOT / "build" / "pythons"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclass(frozen=True)
class Debian:
    """Which packages are taken.

    Attributes:
        suite: Of the archive.
        architecture: As dpkg names it; "" for this machine's.
        emulator: The program that runs programs for that architecture; "" where the machine does.
        more: Packages that are unpacked beside Python's.
    """

    suite: str = "sid"
    architecture: str = ""
    emulator: str = ""
    more: Sequence[str] = ()


def provide(name: str, debian: Debian = Debian()) -> str | None:
    """Returns the interpreter for "3.14", unpacked if it was not yet; None where Debian has none.

    Why there is none is printed. Below root/, three folders above the interpreter, lies all of it.
    """
    folder = PYTHONS / "-".join(filter(None, (name, debian.architecture)))
    root = folder / "root"
    stamp = folder / "complete"
    if not stamp.is_file():
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            return None
        print(f"Python {name}: unpacking Debian's into {folder}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            download(name, folder, debian)
        except subprocess.CalledProcessError as error:
            print(f"{error}:\n{error.output}", flush=True)
            return None
        # Older suites have the C library in /lib.
        (root / "usr" / "lib").mkdir(parents=True)
        (root / "lib").symlink_to("usr/lib")
        for package in sorted((folder / "cache" / "archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
        make_startable(root, name, debian.emulator)
        stamp.touch()
    return str(root / "usr" / "bin" / f"python{name}")


def download(name: str, folder: Path, debian: Debian) -> None:
    """Downloads the packages of an interpreter, its headers and all that they depend on.

    Raises:
        subprocess.CalledProcessError: Debian's mirror is not known, not reached, or lacks it.
    """
    state, cache = folder / "state", folder / "cache"
    (state / "lists" / "partial").mkdir(parents=True)
    (cache / "archives" / "partial").mkdir(parents=True)
    (state / "status").touch()  # No package is installed: those of this machine are of no use.
    sources = folder / "sources.list"
    source = f"deb [signed-by={KEYRING}] {mirror()} {debian.suite} main\n"
    sources.write_text(source, encoding="utf-8")
    settings = {
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": cache,
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Sandbox::User": "root",
    }
    if debian.architecture:
        settings["APT::Architecture"] = settings["APT::Architectures"] = debian.architecture
    apt = [
        "apt-get",
        "-qq",
        *(word for key in settings for word in ("-o", f"{key}={settings[key]}")),
    ]
    wanted = [f"python{name}-venv", f"libpython{name}-dev", *debian.more]
    for command in (
        ["update"],
        ["install", "--yes", "--no-install-recommends", "--download-only", *wanted],
    ):
        output([*apt, *command])


def mirror() -> str:
    """Returns the address of the mirror that this machine's own packages come from.

    Raises:
        subprocess.CalledProcessError: apt knows none.
    """
    ask = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    found = output([*ask, "Created-By: Packages", "Label: Debian"]).splitlines()
    if not found:
        raise subprocess.CalledProcessError(1, ask, "apt's sources have no mirror of Debian")
    return found[0]


def output(command: Sequence[str]) -> str:
    """Returns what a command prints.

    Raises:
        subprocess.CalledProcessError: It fails; with what it printed.
    """
    return subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ).stdout


def make_startable(root: Path, name: str, emulator: str = "") -> None:
    """Puts a script in an interpreter's place that starts it with the libraries beside it."""
    python = root / "usr" / "bin" / f"python{name}"
    real = python.rename(python.with_name(f"{python.name}.real"))
    if emulator:
        start = f'{emulator} -0 "$0" -L "{root}" "{real}" "$@"'
    else:
        loader = next((root / "usr" / "lib64").glob("ld-linux-*.so.*"))
        libraries = next((root / "usr" / "lib").glob("*-linux-gnu"))
        start = f'"{loader}" --argv0 "$0" --library-path "{libraries}" "{real}" "$@"'
    python.write_text(f"#!/bin/sh\nexec {start}\n", encoding="utf-8")
    python.chmod(0o755)
    # Debian's header includes that of the processor from where it would be installed.
    headers = root / "usr" / "include"
    for header in headers.glob(f"*-linux-gnu/python{name}/pyconfig.h"):
        shutil.copy(header, headers / f"python{name}")
    # Where venv finds pip.
    for facts in (root / "usr" / "lib" / f"python{name}").glob("_sysconfigdata_*.py"):
        text = facts.read_text(encoding="utf-8")
        wheels = "'WHEEL_PKG_DIR': '"
        facts.write_text(text.replace(f"{wheels}/usr", f"{wheels}{root}/usr"), encoding="utf-8")
