# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding written again in numpy, with integers of 64 bits and masks."""

from __future__ import annotations

import numpy as np
import torch

_LOW = np.uint64(0xFFFFFFFF)


def _mixed(x: np.ndarray) -> np.ndarray:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x ^ (x >> np.uint64(shift))
        x = (x * np.uint64(factor)) & _LOW
    return x ^ (x >> np.uint64(16))


def mixed_noise(parameter: int, steps: int, elements: np.ndarray) -> np.ndarray:
    """32 bits of noise for each of some elements of a parameter that has seen so many steps."""
    key = _mixed(np.array((parameter + 0x9E3779B9) & 0xFFFFFFFF, dtype=np.uint64))
    key = _mixed((key + np.uint64(steps)) & _LOW)
    return _mixed((elements.astype(np.uint64) + key) & _LOW)


def rounded(
    exact: torch.Tensor, parameter: int, steps: int, first: int = 0, *, upper: bool = False
) -> torch.Tensor:
    """float32 values in bfloat16: a value a part f of the way to its upper neighbour goes up if the
    noise, an integer of 16 bits, the upper or the lower ones, is at least 2^16 * (1 - f)."""
    bits = exact.detach().cpu().numpy().reshape(-1).view(np.uint32).astype(np.uint64)
    lower, part = bits >> np.uint64(16), bits & np.uint64(0xFFFF)
    drawn = mixed_noise(parameter, steps, np.arange(first, first + bits.size, dtype=np.uint64))
    drawn = drawn >> np.uint64(16) if upper else drawn & np.uint64(0xFFFF)
    goes_up = drawn >= np.uint64(1 << 16) - part
    result = (lower + goes_up.astype(np.uint64)).astype(np.uint16).view(np.int16)
    return torch.from_numpy(result).view(torch.bfloat16).reshape(exact.shape)
