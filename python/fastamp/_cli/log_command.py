# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp --log-to FILE``: the numbers of each iteration of a program as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastamp._cli.output_file import OutputFile
from fastamp._scaler.log_to import log_to

__all__ = ["start"]


def start(place: str) -> None:
    """Logs all gradient scalers of the process from now on, as :func:`fastamp.debug.log_to` does.

    Args:
        place: A file whose name ends in ``.jsonl``, of several processes that train together one
            for each: one JSON object for each row, with ``step``; ``-`` prints them. Any other
            name: a folder for TensorBoard.

    Raises:
        ImportError: TensorBoard's writer is not installed.
        OSError: The file cannot be written; found out now.
    """
    if place != "-" and not place.endswith(".jsonl"):
        from torch.utils.tensorboard import SummaryWriter

        log_to(SummaryWriter(place))
        return
    output = OutputFile(place)
    begun: set[Path] = set()
    if output.path is not None:
        output.put_text("")
        begun.add(output.path)

    def write(row: dict[str, Any], step: int) -> None:
        line = json.dumps({"step": step, **row}) + "\n"
        path = output.path
        if path is None:
            output.put_text(line)
            return
        with path.open("a" if path in begun else "w", encoding="utf-8") as file:
            file.write(line)
        begun.add(path)

    log_to(write)
