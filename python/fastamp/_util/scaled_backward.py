# SPDX-License-Identifier: Apache-2.0
"""Finds the scale that gradients of the running backward pass carry, for those that keep them."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor
from torch.autograd import Variable

# While nobody asks, nobody pays for it. A list: torch.compile knows them.
_asking: list[ref[Any]] = []


class _Scale:
    """Scale of a backward pass, which alone holds it: one that raises leaves none behind."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> None:
        """At the end of the pass, which calls what it holds."""


_running: ref[_Scale] | None = None


def ask_for_scales(who: Any) -> None:
    """Notes the scales of backward passes from now on, as long as ``who`` lives."""
    _asking.append(ref(who, _asking.remove))


def scale_of_backward() -> Tensor | None:
    """The scale of the backward pass that runs; ``None`` if its loss was not scaled."""
    scale = _running and _running()
    return scale.tensor if scale else None


def scaled(output: Tensor, scale: Tensor) -> Tensor:
    """The product of a loss and a scale, whose backward passes say so."""
    product = output * scale
    if _asking and product.requires_grad:
        product.register_hook(partial(_begin, scale))  # type: ignore[no-untyped-call]
    return product


def _begin(scale: Tensor, _: Tensor) -> None:
    global _running
    running = _Scale(scale.clone())  # update() writes the scaler's own.
    _running = ref(running)
    Variable._execution_engine.queue_callback(running)
