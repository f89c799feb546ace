# SPDX-License-Identifier: Apache-2.0
"""What all reports do with files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["JsonReport", "write_report"]


class JsonReport:
    """A base of reports that are plain data, too."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        raise NotImplementedError

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns :meth:`to_dict` as JSON.

        Args:
            path: A file to write it to as well.

        Raises:
            OSError: The file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text


def write_report(report: Any, path: str | os.PathLike[str]) -> None:
    """Writes a file: JSON or a page if its name ends in ``.json`` or ``.html``, else the text.

    Raises:
        OSError: The file cannot be written.
    """
    makers = {".json": "to_json", ".html": "to_html"}
    maker = getattr(report, makers.get(Path(path).suffix.lower(), ""), report.__str__)
    text: str = maker()
    Path(path).write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
