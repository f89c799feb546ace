"""Automatic mixed precision for PyTorch: autocast and loss scaling in C++ and CUDA."""

from __future__ import annotations

from pathlib import Path

from fastamp._loader import load
from fastamp._paths import cmake_prefix_path, include_path

_C = load(Path(__file__).resolve().parent)


def build_info() -> dict[str, str]:
    """Returns the facts fixed when the native part was built.

    Returns:
        ``version`` (fastamp's), ``torch_version``, ``cuda_version`` (empty for a CPU-only build),
        ``cuda_archs``, ``compiler`` and ``build_type``.
    """
    info: dict[str, str] = _C.build_info()
    return info


__version__: str = build_info()["version"]

__all__ = ["__version__", "build_info", "cmake_prefix_path", "include_path"]
