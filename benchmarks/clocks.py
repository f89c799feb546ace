# SPDX-License-Identifier: Apache-2.0
"""How a block is timed: by the host, or by events on a GPU with a cold L2 cache before every call.

Statements are compiled into a function, so that the names they use are local variables, which are
the cheapest to read: a loop of ``torch.utils.benchmark.Timer`` looks them up as globals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch

Loop = Callable[[int], float]
#: Writes of twice the L2 cache before a block: on an H200, by its bandwidth, half a millisecond.
LEAD = 16


def _compile(body: str, statement: str, names: dict[str, Any]) -> Loop:
    arguments = ", ".join(f"{name}={name}" for name in names)
    namespace: dict[str, Any] = dict(names)
    source = f"def loop(_count, *, {arguments}):\n{body}"
    exec(compile(source, f"<{statement}>", "exec"), namespace)
    loop: Loop = namespace["loop"]
    return loop


def host_loop(statement: str, names: dict[str, Any], device: str) -> Loop:
    """Returns a function of a count: nanoseconds of so many calls, until the device is idle."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    hidden = {"_clock": time.perf_counter_ns, "_repeat": repeat, "_wait": wait}
    body = (
        "    _wait()\n"
        "    _start = _clock()\n"
        "    for _ in _repeat(None, _count):\n"
        f"        {statement}\n"
        "    _wait()\n"
        "    return _clock() - _start\n"
    )
    return _compile(body, statement, {**names, **hidden})


def event_loop(statement: str, names: dict[str, Any]) -> Loop:
    """Returns the same for a GPU: each call's time by events, its L2 cache emptied before it.

    The writes that empty the cache also give the host a lead, so that calls are not timed waiting
    for it unless the host is the slower of the two. There are more of them before the first call:
    in a block of few calls what the host took before its first launch would be counted.
    """
    size = 2 * torch.cuda.get_device_properties().L2_cache_size
    flush = torch.empty(size, dtype=torch.uint8, device="cuda").zero_

    def events(count: int) -> list[torch.cuda.Event]:
        return [torch.cuda.Event(enable_timing=True) for _ in range(count)]

    def total(begin: list[torch.cuda.Event], end: list[torch.cuda.Event]) -> float:
        milliseconds = sum(a.elapsed_time(b) for a, b in zip(begin, end, strict=True))
        return milliseconds * 1e6

    # A statement may use any other name, those of builtins too.
    hidden = {"_flush": flush, "_events": events, "_wait": torch.cuda.synchronize}
    hidden |= {"_pairs": zip, "_total": total, "_repeat": repeat, "_lead": LEAD}
    body = (
        "    _begin, _end = _events(_count), _events(_count)\n"
        "    for _ in _repeat(None, _lead):\n"
        "        _flush()\n"
        "    for _first, _last in _pairs(_begin, _end):\n"
        "        _flush()\n"
        "        _first.record()\n"
        f"        {statement}\n"
        "        _last.record()\n"
        "    _wait()\n"
        "    return _total(_begin, _end)\n"
    )
    return _compile(body, statement, {**names, **hidden})
