# SPDX-License-Identifier: Apache-2.0
"""Weight copies: the casts of weights that an optimizer writes for the next region."""

from __future__ import annotations

from typing import Any

import torch

import fastamp._C as _C


def check_autocast_dtype(function: str, dtype: Any) -> None:
    """Refuses dtypes that weight copies cannot have with a ValueError."""
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        raise ValueError(
            f"{function}: expected autocast_dtype to be None, torch.float16, torch.bfloat16 or "
            f"torch.float8_e4m3fn, got {dtype!r}"
        )


def make_weight_copies(dtype: torch.dtype | None) -> _C.WeightCopies | None:
    """Keeper of the weight copies of an optimizer's weights; both end with the optimizer."""
    if dtype is None:
        return None
    return _C.WeightCopies(dtype)


def forget_casts(weights: list[torch.Tensor]) -> None:
    """Drops casts of weights that torch has stepped: it may move no version counter."""
    _C.drop_kept_casts(weights)
