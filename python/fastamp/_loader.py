# SPDX-License-Identifier: Apache-2.0
"""Loads the native module, and says clearly why when it cannot be loaded.

LibTorch's C++ ABI changes between minor versions. Loading a module built for another one fails, if
one is lucky, with an undefined mangled symbol; so the versions are compared before the library is
opened.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import torch

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps <fastamp's source folder>"


def check_versions(built: dict[str, str], torch_version: str, torch_cuda: str | None) -> None:
    """Refuses a build that was made for another torch.

    Args:
        built: Contents of build_info.json; ``torch_version`` ("2.11.0"), ``cuda_version`` ("13.0",
            or "" for a CPU-only build).
        torch_version: Version of the torch that is running, e.g. "2.11.0+cu130".
        torch_cuda: CUDA version of that torch, or None.

    Raises:
        ImportError: The minor versions of torch differ, or a CUDA build meets another CUDA major.
    """
    runs = f"torch {torch_version} (CUDA {torch_cuda or 'none'})"
    was = f"torch {built['torch_version']} (CUDA {built['cuda_version'] or 'none'})"
    same_torch = torch_version.split(".")[:2] == built["torch_version"].split(".")[:2]
    cuda_major = (torch_cuda or "").partition(".")[0]
    # A CPU-only fastamp works with any CUDA of the same torch: it links nothing of CUDA.
    same_cuda = built["cuda_version"].partition(".")[0] in ("", cuda_major)
    if not (same_torch and same_cuda):
        raise ImportError(
            f"fastamp was built for {was}, but this is {runs}. Rebuild it: {_REBUILD}"
        )


def load(package_dir: Path) -> ModuleType:
    """Imports ``fastamp._C`` after checking that it fits the running torch.

    Args:
        package_dir: Folder of the package, which holds build_info.json.

    Returns:
        The native module.

    Raises:
        ImportError: The native part is missing, or was built for another torch.
    """
    info = package_dir / "build_info.json"
    if not info.is_file():
        raise ImportError(f"fastamp in {package_dir} has no native part. Build it: {_REBUILD}")
    built = json.loads(info.read_text(encoding="utf-8"))
    check_versions(built, torch.__version__, torch.version.cuda)
    return importlib.import_module("fastamp._C")
