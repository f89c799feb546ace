# SPDX-License-Identifier: Apache-2.0
"""Moments in 8 bits written again in numpy, with powers of two and tables of all codes."""

from __future__ import annotations

import numpy as np

from support.rounding_twin import mixed_noise

# Bits of the exponent of first and of second moments.
FIRST, SECOND = 4, 5


def values(exponent_bits: int, scale: int) -> np.ndarray:
    """The magnitudes of all codes of a group, ascending: 0, then (1 + m / 8) * 2^e."""
    if scale == 255:
        return np.full(8 << exponent_bits, np.nan)
    codes = np.arange(8 << exponent_bits)
    magnitudes = np.ldexp(1 + codes % 8 / 8, codes // 8 + scale - 127)
    magnitudes[0] = 0
    return magnitudes


def scale_of(group: np.ndarray, exponent_bits: int) -> int:
    """The least scale whose greatest code reaches a group's greatest magnitude."""
    greatest = np.abs(group.astype(np.float64)).max()
    if not np.isfinite(greatest):
        return 255
    for scale in range(1, 255):
        if values(exponent_bits, scale)[-1] >= greatest or scale + (1 << exponent_bits) - 1 == 254:
            return scale
    raise AssertionError


def encoded(
    moments: np.ndarray, exponent_bits: int, size: int, noise: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of float32 moments; without noise they are rounded to nearest even."""
    codes = np.empty(moments.size, dtype=np.uint8)
    scales = np.empty(moments.size // size, dtype=np.uint8)
    for g in range(scales.size):
        part = slice(g * size, (g + 1) * size)
        group = moments.reshape(-1)[part].astype(np.float64)
        scales[g] = scale_of(group, exponent_bits)
        if scales[g] == 255:
            codes[part] = 0
            continue
        drawn = None if noise is None else noise[part]
        codes[part] = _codes_of(group, values(exponent_bits, int(scales[g])), drawn, exponent_bits)
    return codes, scales


def _codes_of(
    group: np.ndarray, table: np.ndarray, noise: np.ndarray | None, exponent_bits: int
) -> np.ndarray:
    magnitude = np.minimum(np.abs(group), table[-1])
    lower = np.searchsorted(table, magnitude, side="right") - 1
    upper = np.minimum(lower + 1, table.size - 1)
    gap = np.where(upper > lower, table[upper] - table[lower], 1)
    part = (magnitude - table[lower]) / gap
    if noise is None:
        up = (part > 0.5) | ((part == 0.5) & (lower % 2 == 1))
    else:
        up = np.floor(part * 2**20) + noise >= 2**20
    codes = np.where(up, upper, lower)
    small = magnitude < table[1]
    codes[small] = (magnitude[small] > 0) if exponent_bits == SECOND else 0
    if exponent_bits == FIRST:
        codes = codes | (np.signbit(group).astype(np.int64) << 7)
    return codes.astype(np.uint8)


def decoded(codes: np.ndarray, scales: np.ndarray, exponent_bits: int, size: int) -> np.ndarray:
    """The float32 moments of codes."""
    result = np.empty(codes.size, dtype=np.float32)
    top = (8 << exponent_bits) - 1
    for g in range(scales.size):
        part = slice(g * size, (g + 1) * size)
        table = values(exponent_bits, int(scales[g]))
        magnitude = table[codes.reshape(-1)[part] & top]
        negative = (codes.reshape(-1)[part] > top) if exponent_bits == FIRST else False
        result[part] = np.where(negative, -magnitude, magnitude)
    return result


def noise(parameter: int, steps: int, count: int, exponent_bits: int, first: int = 0) -> np.ndarray:
    """20 bits of noise of each element: the upper ones for second moments, the lower for first."""
    drawn = mixed_noise(parameter, steps, np.arange(first, first + count, dtype=np.uint64))
    return (
        drawn >> np.uint64(12) if exponent_bits == SECOND else drawn & np.uint64(0xFFFFF)
    ).astype(np.int64)
