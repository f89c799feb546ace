# SPDX-License-Identifier: Apache-2.0
"""Notices ``torch.export.export`` in a region, which the exported program will not have."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

import fastamp._C as _C
from fastamp._dynamo import compiler

__all__ = ["region_is_meant"]

_TRACE = "torch.export._trace"
_thread = threading.local()
_has_warned = False


@contextlib.contextmanager
def region_is_meant() -> Iterator[None]:
    """Exports in a region for code and decomposes the program in it: no warning."""
    before = getattr(_thread, "is_meant", False)
    _thread.is_meant = True
    try:
        yield
    finally:
        _thread.is_meant = before


def _device_of_region() -> str | None:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return device
    return None


def _notice() -> None:
    global _has_warned
    device = _device_of_region()
    if device is None or _has_warned or getattr(_thread, "is_meant", False):
        return
    # The ONNX exporter decomposes in the region, and so does what docs/float8.md says.
    if torch.onnx.is_in_onnx_export() or any(_C.float8_numbers()):
        return
    if any("torch.onnx" in frame.f_globals.get("__name__", "") for frame in _callers()):
        return
    _has_warned = True
    dtype = torch.get_autocast_dtype(device)
    warnings.warn(
        "torch.export.export does not record the autocast region around it: the program will "
        "compute in the dtypes of its weights and inputs. To export this precision: "
        f"fastamp.inference.export(model, args, {dtype}, lists={device!r}); or call "
        "run_decompositions() of the program in the region, too.",
        stacklevel=4,
    )


def _callers() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _watch() -> None:
    module: ModuleType = sys.modules[_TRACE]
    original = getattr(module, "_export", None)
    if original is None or hasattr(original, "fastamp_notices"):
        return

    @functools.wraps(original)
    def _export(*args: Any, **kwargs: Any) -> Any:
        _notice()
        return original(*args, **kwargs)

    _export.fastamp_notices = True  # type: ignore[attr-defined]
    vars(module)["_export"] = _export
    public = sys.modules.get("torch.export")
    if public is not None and vars(public).get("_export") is original:
        vars(public)["_export"] = _export


compiler.when_loaded(_TRACE, _watch)
