# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp --fuse``: torch's optimizers of a program take fastamp's steps."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from fastamp._scaler.steps import FUSABLE
from fastamp.optim import fuse_

__all__ = ["start"]


def start() -> None:
    """Carries every SGD, Adam, AdamW and Muon that is made from now on by ``optim.fuse_``.

    Warns:
        UserWarning: Of an optimizer with an option that the fused step does not know; it keeps
            torch's.
    """
    for kind in FUSABLE:
        kind.__init__ = _fusing(kind, kind.__init__)  # type: ignore[method-assign]


def _fusing(
    kind: type[torch.optim.Optimizer], original: Callable[..., None]
) -> Callable[..., None]:
    @functools.wraps(original)
    def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if type(optimizer) is kind:
            try:
                fuse_(optimizer)
            except ValueError as error:
                warnings.warn(f"--fuse: {error}", stacklevel=2)

    return init
