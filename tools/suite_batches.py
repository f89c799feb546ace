# SPDX-License-Identifier: Apache-2.0
"""Small pytest files run together, since each process begins with seconds of imports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import suite_parts
from suite_costs import Costs
from suite_queue import Entry

START_SECONDS = 2.0  # what a process costs before its first test: fastamp, torch._dynamo, pytest
SMALL_SECONDS = 8.0  # a file that costs more runs by itself
BATCH_SECONDS = 16.0  # what a process that runs several costs at most


def is_small(entry: Entry, costs: Costs) -> bool:
    """Returns whether an entry is one file of the product that costs little."""
    cost = costs.get((entry.runner, entry.name), SMALL_SECONDS)
    is_file = entry.runner == "pytest" and entry.command[0] == entry.name
    return is_file and cost < SMALL_SECONDS and entry.part == suite_parts.PRODUCT


def batched(entries: Iterable[Entry], costs: Costs) -> list[Entry]:
    """Returns entries of which those small ones of a folder that are run alike are put together.

    Args:
        entries: Each a file, or what does not become part of a batch.
        costs: Of entries; those of batches are added.
    """
    found: list[Entry] = []
    open_batches: dict[tuple[str, tuple[str, ...], str], list[Entry]] = {}
    for entry in entries:
        if not is_small(entry, costs):
            found.append(entry)
            continue
        folder = entry.name.rpartition("/")[0]
        batch = open_batches.setdefault((folder, entry.command[1:], entry.needs), [])
        if batch and _cost([*batch, entry], costs) > BATCH_SECONDS:
            found.append(_joined(batch, costs))
            batch.clear()
        batch.append(entry)
    return found + [_joined(batch, costs) for batch in open_batches.values()]


def _cost(batch: list[Entry], costs: Costs) -> float:
    own = (costs[entry.runner, entry.name] - START_SECONDS for entry in batch)
    return START_SECONDS + sum(max(cost, 0.1) for cost in own)


def _joined(batch: list[Entry], costs: Costs) -> Entry:
    first, *rest = batch
    if not rest:
        return first
    files = tuple(entry.name for entry in batch)
    name = f"{first.name} and {len(rest)} more up to {rest[-1].name.rpartition('/')[2]}"
    costs["pytest", name] = _cost(batch, costs)
    return replace(first, name=name, command=(*files, *first.command[1:]))
