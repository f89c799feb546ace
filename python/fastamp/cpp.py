# SPDX-License-Identifier: Apache-2.0
"""Folders of the C++ part of this installation, for programs that build against it."""

from __future__ import annotations

from pathlib import Path

import torch

from fastamp._util.loader import native_folder

__all__ = ["cmake_prefix_path", "include_path"]

_FOLDER = native_folder(Path(__file__).resolve().parent, torch.__version__)

#: Folder for CMAKE_PREFIX_PATH, as ``torch.utils.cmake_prefix_path`` is torch's.
cmake_prefix_path: str = str(_FOLDER / "share" / "cmake")

#: Folder that holds ``fastamp/fastamp.h``.
include_path: str = str(_FOLDER / "include")
