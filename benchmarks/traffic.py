# SPDX-License-Identifier: Apache-2.0
"""Bytes that kernels move, and the share of a copy's bandwidth that they are predicted to reach.

A prediction is no measurement and is called one wherever it is shown: docs/cuda.md says what it
follows from. What a row reaches is measured beside a copy on the same device, turn by turn with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.harness import COPY, FASTAMP, Candidate, Passes, Result, Row

# Larger copies gain nothing, and cost memory: half of it is read, half written.
LARGEST_COPY = 2 * 2**30
# Predictions are for lists that no L2 cache holds, whose time is not that of the launch.
PREDICTED_FROM = 256 * 2**20


@dataclass(frozen=True)
class Kernel:
    """Traffic of a kernel in memory: fp32 gradients, weights and moments.

    Attributes:
        read: Bytes per element.
        written: Bytes per element.
        predicted: Least and greatest share of a copy's bandwidth.
    """

    read: int
    written: int
    predicted: tuple[float, float]


# docs/cuda.md shows this table; a test compares the two. SGD is without momentum, and both steps
# write the unscaled gradients, as rows have them.
KERNELS = {
    "unscale": Kernel(4, 4, (0.90, 0.95)),
    "norm": Kernel(4, 0, (0.85, 0.90)),
    "unscale with norm": Kernel(4, 4, (0.85, 0.90)),
    "SGD": Kernel(8, 8, (0.88, 0.93)),
    "AdamW": Kernel(16, 16, (0.88, 0.93)),
    "cast": Kernel(4, 2, (0.90, 0.95)),
}


def passes(elements: int, *kernels: str, written: bool = True) -> Passes:
    """Returns what these kernels move, one after the other, over so many elements.

    Args:
        elements: Of all tensors together.
        *kernels: Names in ``KERNELS``.
        written: Whether they write; unscaling by 1 does not.
    """
    found = [KERNELS[name] for name in kernels]
    each = [kernel.read + (kernel.written if written else 0) for kernel in found]
    return [(name, count * elements) for name, count in zip(kernels, each, strict=True)]


def total(done: Passes) -> int:
    """Returns the bytes of all passes."""
    return sum(count for _, count in done)


def predicted(done: Passes) -> tuple[float, float] | None:
    """Returns the share that is predicted of these passes together; None for small lists."""
    if total(done) < PREDICTED_FROM or any(name not in KERNELS for name, _ in done):
        return None
    # Each takes its bytes over its share of the bandwidth.
    low, high = (
        total(done) / sum(count / KERNELS[name].predicted[end] for name, count in done)
        for end in (0, 1)
    )
    return low, high


def percent(low: float, high: float) -> str:
    """Returns a range of shares as text."""
    first, last = f"{100 * low:.0f}", f"{100 * high:.0f}"
    return f"{first} %" if first == last else f"{first}-{last} %"


def rate(gigabytes: float) -> str:
    """Returns a number of GB/s, three digits at least, never with an exponent."""
    return f"{gigabytes:.0f}" if gigabytes >= 100 else f"{gigabytes:.3g}"


def share(result: Result) -> tuple[float, float, float]:
    """Returns quartile, median and quartile of fastamp's bandwidth over the copy's."""
    ratio = result.bytes_moved / result.copy_bytes
    low, middle, high = statistics.quantiles(result.ratios(COPY), n=4)
    return low * ratio, middle * ratio, high * ratio


def shown(result: Result) -> str:
    """Returns what fastamp moves, beside the copy and the prediction; "" without a copy."""
    if not result.copy_bytes or COPY not in result.samples:
        return ""
    own = rate(result.bytes_moved / result.median(FASTAMP))
    copied = rate(result.copy_bytes / result.median(COPY))
    low, middle, high = share(result)
    text = f"{own} GB/s, {100 * middle:.0f} % ({percent(low, high)}) of a copy's {copied} GB/s"
    expected = predicted(result.passes)
    return text if expected is None else f"{text}; predicted {percent(*expected)}"


def with_copy(
    make: Callable[[], dict[str, Candidate]], size: int, device: str
) -> dict[str, Candidate]:
    """Returns the candidates and one that copies, which reads and writes ``size`` bytes in all."""
    found = make()
    source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
    names = {"source": source, "target": torch.empty_like(source)}
    return {**found, COPY: Candidate("target.copy_(source)", names)}


def beside_a_copy(row: Row) -> Row:
    """Returns the row; one of kernels on a GPU with a copy of as many bytes as a candidate."""
    if row.device != "cuda" or not row.passes:
        return row
    size = min(row.bytes_moved, LARGEST_COPY)
    candidates = partial(with_copy, row.candidates, size, row.device)
    return replace(row, candidates=candidates, copy_bytes=size)
