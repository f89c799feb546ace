# SPDX-License-Identifier: Apache-2.0
"""How long the nets run: SEEDS in the environment is the number of rounds, 1 if it is not set."""

from __future__ import annotations

import os


def rounds() -> int:
    """Rounds that each net makes, every one with a seed of its own."""
    return max(1, int(os.environ.get("SEEDS") or 1))
