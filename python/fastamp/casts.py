# SPDX-License-Identifier: Apache-2.0
"""Casts of weights that outlive a region, or are made in one launch: see docs/python.md."""

from __future__ import annotations

from fastamp._casts.cast_together import together
from fastamp._casts.kept_casts import KeptCasts, drop, keep, kept
from fastamp._util.publish import publish

__all__ = [
    "KeptCasts",
    "drop",
    "keep",
    "kept",
    "together",
]

publish(__name__, globals())
