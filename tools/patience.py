# SPDX-License-Identifier: Apache-2.0
"""Time limits that end what hangs, and never what is only slow.

A limit is given as at least ten times what the work takes on two idle cores, and is stretched by
how much slower the machine is now: a busy machine is no defect.
"""

from __future__ import annotations

import os
import time
from functools import lru_cache

# Seconds that _work() takes on an idle core of the machine that limits were chosen on.
_REFERENCE = 0.01
_VARIABLE = "FASTAMP_TEST_SLOWNESS"  # Child processes use their parent's measurement.


def _work() -> float:
    start = time.perf_counter()
    total = 0
    for i in range(250_000):
        total += i % 7
    return time.perf_counter() - start


@lru_cache(maxsize=1)
def slowness() -> float:
    """Returns how many times longer work takes here now than on the reference machine; >= 1."""
    measured = os.environ.get(_VARIABLE)
    if measured is None:
        # The slowest of three: other programs come and go.
        measured = str(max(1.0, max(_work() for _ in range(3)) / _REFERENCE))
        os.environ[_VARIABLE] = measured
    return float(measured)


def measure_again() -> None:
    """Forgets what was measured: for a process that goes on as another program."""
    os.environ.pop(_VARIABLE, None)
    slowness.cache_clear()


def patience(seconds: float) -> float:
    """A limit of ``seconds`` on two idle cores, for this machine as busy as it is."""
    return seconds * slowness()
