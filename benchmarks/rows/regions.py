# SPDX-License-Identifier: Apache-2.0
"""Entering and leaving a region from Python."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from benchmarks.goals import at_most
from benchmarks.harness import Candidate, Goal, Row
from benchmarks.sides import REGIONS


def _row(name: str, statement: str, goal: Goal | None) -> Row:
    def candidates() -> dict[str, Candidate]:
        return {
            which: Candidate(
                statement,
                {
                    "autocast": autocast,
                    "region": autocast("cpu", dtype=torch.bfloat16),
                    "other": autocast("cpu", enabled=False),
                    "bf16": torch.bfloat16,
                    "decorated": autocast("cpu", dtype=torch.bfloat16)(lambda: None),
                },
            )
            for which, autocast in REGIONS.items()
        }

    return Row(name, candidates, "Regions", goal=goal)


async def _hundred_times(region: Any) -> None:
    for _ in range(100):
        with region:
            pass


def _in_a_task() -> Row:
    def candidates() -> dict[str, Candidate]:
        loop = asyncio.new_event_loop()
        return {
            which: Candidate(
                "run(work(region))",
                {
                    "run": loop.run_until_complete,
                    "work": _hundred_times,
                    "region": autocast("cpu", dtype=torch.bfloat16),
                },
            )
            for which, autocast in REGIONS.items()
        }

    return Row("region: 100 times in an asyncio task", candidates, "Regions")


def rows() -> list[Row]:
    """Returns the rows; regions are host work, the same for every device."""
    constructed = 'with autocast("cpu", dtype=bf16): pass'
    nested = "with region, other: pass"
    return [
        _row("region: reused", "with region: pass", at_most(350)),
        _row("region: constructed each time", constructed, at_most(500)),
        _row("region: nested in another, reused", nested, None),
        _row("region: decorated function", "decorated()", None),
        _in_a_task(),
    ]
