# SPDX-License-Identifier: Apache-2.0
"""A tensor in 32 numbers, of which two show how far apart two tensors are."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch

from fastamp._debug.watch.modules import is_readable

_SIZE = 32
#: Unit roundoff by name of the dtype; 0 for numbers that are not rounded.
_ROUNDOFF = {
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float32": 2.0**-24,
    "float64": 2.0**-53,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}


@dataclasses.dataclass(frozen=True)
class Sketch:
    """Sketch that a record keeps of a tensor.

    Sums of elements with signs, a linear function of the tensor: the distance of two sketches is
    about that of the tensors, in the 2-norm, and a multiple of a tensor has the same multiple of
    its sketch. Tensors of up to 32 elements are kept as they are. The signs depend on positions
    alone, not on dtype, device, random state or version of torch.
    """

    shape: tuple[int, ...]
    dtype: str
    norm: float
    """2-norm of the finite elements."""
    non_finite: int
    """Elements that are inf or NaN; they count as 0 in the rest."""
    sums: tuple[float, ...]

    @property
    def roundoff(self) -> float:
        """The relative error of rounding to its dtype."""
        return _ROUNDOFF.get(self.dtype, 0.0)

    def times(self, factor: float) -> Sketch:
        """The sketch of a multiple."""
        sums = tuple(value * factor for value in self.sums)
        return dataclasses.replace(self, norm=self.norm * abs(factor), sums=sums)

    def distance(self, other: Sketch) -> float:
        """The 2-norm of the difference, relative to the larger tensor; both of one shape."""
        size = max(self.norm, other.norm)
        return math.dist(self.sums, other.sums) / size if size > 0 else 0.0

    def as_list(self) -> list[Any]:
        """Returns data for JSON."""
        return [list(self.shape), self.dtype, self.norm, self.non_finite, list(self.sums)]

    @classmethod
    def from_list(cls, data: Any) -> Sketch:
        """Reads :meth:`as_list`.

        Raises:
            TypeError, ValueError: It is something else.
        """
        shape, dtype, norm, non_finite, sums = data
        return cls(tuple(shape), str(dtype), float(norm), int(non_finite), tuple(map(float, sums)))


@functools.lru_cache(maxsize=16)
def _places_and_signs(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(count, dtype=torch.int64, device=device)
    if count <= _SIZE:
        return numbers, torch.ones(count, dtype=torch.float64, device=device)
    mixed = numbers * 0x5851F42D4C957F2D + 0x14057B7EF767814F  # Wraps, as integers of torch do.
    mixed = (mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D
    signs = ((mixed >> 40) & 1) * 2 - 1
    return (mixed >> 45) & (_SIZE - 1), signs.double()


@torch.no_grad()
def sketch_of(tensor: torch.Tensor) -> Sketch | None:
    """Returns the sketch of a tensor of numbers; None of others. Waits for the device."""
    if not is_readable(tensor) or tensor.is_complex():
        return None
    with torch._C._DisableAutocast():
        values = tensor.detach().reshape(-1).double()
        finite = values.isfinite()
        non_finite = int(values.numel() - finite.sum())
        if non_finite:
            values = torch.where(finite, values, 0.0)
        places, signs = _places_and_signs(values.numel(), values.device)
        sums = values.new_zeros(min(_SIZE, values.numel()))
        sums.index_add_(0, places, values * signs)
        norm = float(torch.linalg.vector_norm(values))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Sketch(tuple(tensor.shape), dtype, norm, non_finite, tuple(sums.tolist()))
