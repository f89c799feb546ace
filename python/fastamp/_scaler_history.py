"""The ring of past iterations that a gradient scaler keeps on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import fastamp._C as _C
from fastamp._scaler_report import StepRecord

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_SIZE = 128


class HistoryRing:
    """The last iterations as rows of (scale, skipped, norm, growth tracker), written by the device.

    Attributes:
        rows: fp32, shape [capacity, 4].
        count: int64 scalar: rows ever written; the next goes to ``count % capacity``.
    """

    __slots__ = ("count", "first", "rows")

    def __init__(self, capacity: int, device: torch.device) -> None:
        """Makes an empty ring."""
        self.rows = torch.zeros((capacity, _C.HISTORY_COLUMNS), dtype=torch.float32, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.first = 0  # A loaded history may begin later than its ring reaches back.

    def read(self) -> list[StepRecord]:
        """Returns the rows that are there, oldest first; waits for the device."""
        count = int(self.count.item())
        rows = self.rows.tolist()
        capacity = len(rows)
        first = max(self.first, count - capacity)
        return [
            StepRecord(step, scale, skipped != 0.0, norm, int(tracker))
            for step in range(first, count)
            for scale, skipped, norm, tracker in [rows[step % capacity]]
        ]

    def load(self, records: list[StepRecord]) -> None:
        """Replaces the contents; of too many rows the last ones are kept."""
        capacity = self.rows.shape[0]
        # Where no device is named the caller's default device would be taken.
        here: Any = {"dtype": torch.float32, "device": "cpu"}
        rows = torch.zeros((capacity, _C.HISTORY_COLUMNS), **here)
        for record in records[-capacity:]:
            values = [record.scale, float(record.skipped), record.norm, record.growth_tracker]
            rows[record.step % capacity] = torch.tensor(values, **here)
        self.rows.copy_(rows)
        self.count.fill_(records[-1].step + 1 if records else 0)
        self.first = records[0].step if records else 0


def checked_records(data: Any) -> list[StepRecord]:
    """Reads rows of a checkpoint.

    Raises:
        ValueError: They are not a list of five numbers each, of consecutive steps.
    """
    try:
        records = [
            StepRecord(int(step), float(scale), bool(skipped), float(norm), int(tracker))
            for step, scale, skipped, norm, tracker in data
        ]
    except (TypeError, ValueError) as error:
        raise ValueError(
            'load_state_dict: expected state_dict["history"] to have rows of (step, scale, '
            f"skipped, norm, growth tracker), got {data!r:.200}"
        ) from error
    steps = [record.step for record in records]
    if steps and steps != list(range(steps[0], steps[0] + len(steps))):
        raise ValueError(
            f'load_state_dict: expected consecutive steps in state_dict["history"], got {steps}'
        )
    return records


def columns(ring: HistoryRing | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns what the update operator writes to."""
    return (None, None) if ring is None else (ring.rows, ring.count)
