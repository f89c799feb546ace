# SPDX-License-Identifier: Apache-2.0
"""Statistics of repeated measurements: how much two runs may differ by chance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its confidence interval."""

    low: float
    middle: float
    high: float


def _bootstrap_medians(values: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.float64]:
    """Returns medians of resamples made of blocks of neighbours.

    Neighbouring repeats are alike (frequency, other programs), so single values drawn on their own
    would give intervals that are too narrow. Blocks go round the end (circular block bootstrap) and
    have about the square root of the number of values.
    """
    count = len(values)
    block = max(1, round(count**0.5))
    generator = np.random.default_rng(seed)
    starts = generator.integers(count, size=(RESAMPLES, -(-count // block)))
    places = (starts[:, :, None] + np.arange(block)) % count
    medians: npt.NDArray[np.float64] = np.median(
        values[places.reshape(RESAMPLES, -1)[:, :count]], axis=1
    )
    return medians


def change(old: list[float], new: list[float], confidence: float) -> Interval:
    """Returns the ratio of two medians, new over old, with its bootstrap confidence interval.

    Args:
        old: Positive values in the order they were measured, two at least.
        new: The same, measured in another run; of any length.
        confidence: Of the two-sided interval, e.g. 0.99. Percentiles of 4000 resamples: beyond
            0.9995 the ends are those of the most extreme resamples.
    """
    logs = [np.log(np.asarray(values, dtype=np.float64)) for values in (old, new)]
    before, after = (_bootstrap_medians(values, seed) for seed, values in enumerate(logs))
    tail = (1 - confidence) / 2
    low, high = np.exp(np.quantile(after - before, [tail, 1 - tail]))
    middle = float(np.exp(np.median(logs[1]) - np.median(logs[0])))
    return Interval(float(low), middle, float(high))
