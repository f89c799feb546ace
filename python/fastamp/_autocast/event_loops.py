# SPDX-License-Identifier: Apache-2.0
"""Regions in asyncio: a region that is open while its task waits is other tasks', too."""

from __future__ import annotations

import sys
import threading
import types
import warnings

import fastamp._C as _C

__all__ = ["note_region"]


class _Here(threading.local):
    is_waiting = False
    """Whether the thread's event loop is going to look."""


_here = _Here()


def note_region() -> None:
    """Called before a region is entered on a thread on which an event loop runs.

    The loop is asked to look once it has control again: the task waits by then, or is over.
    """
    if _here.is_waiting:
        return
    import asyncio  # Somebody has, or no loop would run; importing fastamp does not.

    frame = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) in ("torch", "fastamp"):
        frame = frame.f_back
    place = frame.f_code.co_filename, frame.f_lineno
    asyncio.get_running_loop().call_soon(_look, _C.region_depth(), place)
    _here.is_waiting = True


def _package_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _look(regions_before: int, place: tuple[str, int]) -> None:
    _here.is_waiting = False
    if _C.region_depth() > regions_before:
        warnings.warn_explicit(
            "autocast: expected a region in an asyncio task to end before the task waits, got one "
            "that is open across an await. Regions are the thread's: other tasks run in it "
            "meanwhile, and this one goes on in theirs. Put the await outside of the block, or "
            "decorate the coroutine with the region, which leaves it at each await.",
            UserWarning,
            *place,
        )
