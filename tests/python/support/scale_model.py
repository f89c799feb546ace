# SPDX-License-Identifier: Apache-2.0
"""The rule of the scale with all options, written a second time: names instead of signs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from support.amp_reference import fp32


@dataclass
class ScaleModel:
    """A scale, and what moved it. Python's floats are fp64, as the kernel's products are."""

    scale: float
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float | None = None
    max_scale: float | None = None
    fast_growth_interval: int | None = None

    def __post_init__(self) -> None:
        self.clean = 0
        self.patience = self.hysteresis
        self.once_good: float | None = None  # Where the first fall of the last collapse ended.
        self.collapsing = False

    def step(self, overflow: bool) -> None:
        if overflow:
            self.clean = 0
            self.patience = max(self.patience - 1, 0)
            if self.patience == 0:
                self._move_to(fp32(self.scale * self.backoff_factor))
                if not self.collapsing:
                    self.once_good = self.scale
                self.collapsing = True
        else:
            self.patience = self.hysteresis
            self.clean += 1
            grown = fp32(self.scale * self.growth_factor)
            if self.clean == self.growth_interval or self._may_grow_fast_to(grown):
                self.clean, self.collapsing = 0, False
                self._move_to(grown if math.isfinite(grown) else self.scale)
        self._move_to(self.scale)

    def _may_grow_fast_to(self, grown: float) -> bool:
        if self.fast_growth_interval is None or self.clean < self.fast_growth_interval:
            return False
        return self.once_good is None or grown <= self.once_good

    def _move_to(self, scale: float) -> None:
        if self.min_scale is not None:
            scale = max(scale, fp32(self.min_scale))
        if self.max_scale is not None:
            scale = min(scale, fp32(self.max_scale))
        self.scale = scale

    @property
    def limit(self) -> float:
        """As the kernel stores it."""
        good = math.inf if self.once_good is None else self.once_good
        return -good if self.collapsing else good
