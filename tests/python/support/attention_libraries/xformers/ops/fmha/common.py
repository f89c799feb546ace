# SPDX-License-Identifier: Apache-2.0
"""xformers: what it is given, compared before any op is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Inputs:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_bias: Any = None
    p: float = 0.0
    scale: float | None = None

    def validate_inputs(self) -> None:
        if any(x.dtype != self.query.dtype for x in (self.key, self.value)):
            raise ValueError("Query/Key/Value should either all have the same dtype")
        if isinstance(self.attn_bias, torch.Tensor) and self.attn_bias.dtype != self.query.dtype:
            raise ValueError("invalid dtype for bias - should match query's dtype")
