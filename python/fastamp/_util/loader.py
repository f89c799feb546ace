# SPDX-License-Identifier: Apache-2.0
"""Loads the native module, and says clearly why when it cannot be loaded.

LibTorch's C++ ABI changes between minor versions. Loading a module built for another one fails, if
one is lucky, with an undefined mangled symbol; so the versions are compared before the library is
opened.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps <fastamp's source folder>"


def check_version(built: str, torch_version: str) -> None:
    """Refuses a build that was made for another torch.

    Another CUDA, or none, is no reason: the code for CUDA is opened where it fits, and a warning
    says where it does not (``core/cuda_part.cpp``).

    Args:
        built: Version of the torch that fastamp was built for, e.g. "2.11.0".
        torch_version: Version of the torch that is running, e.g. "2.11.0+cu130".

    Raises:
        ImportError: The minor versions differ.
    """
    if torch_version.split(".")[:2] != built.split(".")[:2]:
        raise ImportError(
            f"fastamp was built for torch {built}, but this is torch {torch_version}. "
            f"Rebuild it: {_REBUILD}"
        )


def native_folder(package_dir: Path, torch_version: str) -> Path:
    """Picks the native part that fits a torch and this Python.

    A build from source has one, in the package's own folder. A wheel for several versions has one
    for each minor version of torch, in ``_native/torch2.11`` and so on; each holds a module for
    each Python, and the C++ side: ``lib``, ``include``, ``share``.

    Args:
        package_dir: Folder of the package.
        torch_version: Version of the torch that is running, e.g. "2.11.0+cu130".

    Returns:
        The folder that holds build_info.json.

    Raises:
        ImportError: There is no native part at all, or none that fits.
    """
    if (package_dir / "build_info.json").is_file():
        return package_dir
    parts = {
        folder.name.removeprefix("torch"): folder for folder in (package_dir / "_native").glob("*")
    }
    if not parts:
        raise ImportError(f"fastamp in {package_dir} has no native part. Build it: {_REBUILD}")
    part = parts.get(".".join(torch_version.split(".")[:2]))
    if part is None or not any((part / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
        carried = "; ".join(
            f"torch {minor} with Python {', '.join(_pythons(parts[minor]))}"
            for minor in sorted(parts, key=_by_number)
        )
        python = ".".join(map(str, sys.version_info[:3])) + sys.abiflags
        raise ImportError(
            f"this is torch {torch_version} with Python {python}, and fastamp in {package_dir} "
            f"was built for {carried}. Install one of these versions, or build fastamp for yours: "
            f"{_REBUILD}"
        )
    return part


def _by_number(version: str) -> list[int]:
    return [int(number) for number in version.rstrip("t").split(".")]


def _pythons(part: Path) -> list[str]:
    """Returns the Pythons that a native part has modules for, e.g. ``["3.10", "3.14t"]``."""
    found = (re.match(r"_C\.cpython-(\d)(\d+t?)-", path.name) for path in part.glob("_C.*"))
    return sorted({f"{match[1]}.{match[2]}" for match in found if match}, key=_by_number)


def load(package_dir: Path) -> ModuleType:
    """Imports ``fastamp._C`` after checking that it fits the running torch.

    Args:
        package_dir: Folder of the package, which holds the native part, or several.

    Returns:
        The native module.

    Raises:
        ImportError: The native part is missing, or none was built for this torch and this Python.
    """
    folder = native_folder(package_dir, torch.__version__)
    built = json.loads((folder / "build_info.json").read_text(encoding="utf-8"))
    check_version(built["torch_version"], torch.__version__)
    path = sys.modules["fastamp"].__path__
    if str(folder) not in path:
        path.append(str(folder))
    return importlib.import_module("fastamp._C")
