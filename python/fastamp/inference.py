# SPDX-License-Identifier: Apache-2.0
"""Models that leave training in the precision of their regions: see docs/inference.md."""

from __future__ import annotations

from fastamp._inference.conversion import Conversion, ConvertedParameter, convert
from fastamp._inference.exporting import Exported, export
from fastamp._util.publish import publish

__all__ = [
    "Conversion",
    "ConvertedParameter",
    "Exported",
    "convert",
    "export",
]

publish(__name__, globals())
