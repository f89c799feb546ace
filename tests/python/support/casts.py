# SPDX-License-Identifier: Apache-2.0
"""Counts casts without disturbing them: a TorchDispatchMode would switch the weight cache off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def cast_nodes(weight: torch.Tensor, *outputs: torch.Tensor) -> int:
    """How many casts of ``weight`` the graphs of ``outputs`` hold: nodes leading straight to it."""
    seen: set[Any] = set()
    leading = set()
    pending = [output.grad_fn for output in outputs]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if getattr(following, "variable", None) is weight:
                leading.add(node)
            pending.append(following)
    return len(leading)


def copies_made(function: Callable[[], Any]) -> int:
    """How many dtype copies ``function`` makes, as the profiler sees them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        function()
    counts = {event.key: event.count for event in profile.key_averages()}
    return counts.get("aten::_to_copy", 0)
