# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp --log-to FILE``: the numbers of each iteration of a program as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastamp._scaler.log_to import log_to

__all__ = ["start"]


def start(place: str) -> None:
    """Logs all gradient scalers of the process from now on, as :func:`fastamp.debug.log_to` does.

    Args:
        place: A file whose name ends in ``.jsonl``: one JSON object for each row, with ``step``.
            Any other name: a folder for TensorBoard.

    Raises:
        ImportError: TensorBoard's writer is not installed.
        OSError: The file cannot be written; found out now.
    """
    if not place.endswith(".jsonl"):
        from torch.utils.tensorboard import SummaryWriter

        log_to(SummaryWriter(place))
        return
    path = Path(place).absolute()
    path.write_text("", encoding="utf-8")

    def write(row: dict[str, Any], step: int) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **row}) + "\n")

    log_to(write)
