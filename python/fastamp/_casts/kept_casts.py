# SPDX-License-Identifier: Apache-2.0
"""Casts of weights that outlive regions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import fastamp._C as _C
from fastamp._util.held import Held

if TYPE_CHECKING:
    pass

__all__ = ["KeptCasts", "WeightRequest", "drop", "keep", "kept", "weights_of"]


class KeptCasts(NamedTuple):
    """Numbers of the casts that the process keeps now.

    Attributes:
        copies: How many copies of weights there are.
        bytes: Their size.
    """

    copies: int
    bytes: int


def kept() -> KeptCasts:
    """Returns how many lower-precision copies :class:`keep` holds now, and their size."""
    return KeptCasts(*_C.kept_casts())


def weights_of(function: str, weights: object) -> list[torch.Tensor]:
    if isinstance(weights, torch.nn.Module):
        return list(weights.parameters())
    tensors = [weights] if isinstance(weights, torch.Tensor) else weights
    if isinstance(tensors, Iterable):
        found: list[Any] = list(tensors)
        if all(isinstance(tensor, torch.Tensor) for tensor in found):
            return found
    raise TypeError(
        f"{function}: expected a module, a tensor or tensors, got {type(weights).__name__}"
    )


def drop(
    weights: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor] | None = None,
) -> None:
    """Drops kept copies: the next use of each weight casts it again.

    Needed after writing a weight in a way that its version counter does not show.

    Args:
        weights: A module or tensors; by default all kept copies of the process.

    Raises:
        TypeError: ``weights`` is something else.
    """
    if weights is None:
        _C.drop_all_kept_casts()
    else:
        _C.drop_kept_casts(weights_of("casts.drop", weights))


class WeightRequest(Held):
    """A request for weights."""

    def __init__(self, number: int, release: Callable[[int], None]) -> None:
        """Takes the number that the native part gave the request, and how to end it."""
        self._number: int | None = number
        self._release = release

    def release(self) -> None:
        """Ends it. Safe to call again."""
        number, self._number = self._number, None
        if number is not None:
            self._release(number)


class keep(WeightRequest):  # noqa: N801 (reads as what it does)
    """Keeps the lower-precision casts of weights from one autocast region to the next.

    For frozen weights, inference and gradient accumulation: a weight is cast again only after it
    changed. Works until :meth:`release`, as a ``with`` block, or as long as the weights live::

        fastamp.casts.keep(model)  # for good
        with fastamp.casts.keep(model):  # for a while
            ...

    Outputs and gradients stay torch.amp's bit for bit. Each copy costs the memory of the weight in
    the lower precision (:func:`kept` shows how much). It is freed when it is out of date,
    on :func:`drop`, on :meth:`release`, and at most 16 regions or new copies after its
    weight was.

    Covers the parameters that the module has now, whether they require gradients or not: call
    again after ``load_state_dict(..., assign=True)`` or another call that replaces parameters.
    Tensors that cannot have kept casts (views, DTensors and other subclasses, other dtypes than
    float32) are cast as usual, and so are weights of compiled functions and in CUDA graph captures.
    Optimizers of ``fastamp.optim`` can write the casts of their weights: ``autocast_dtype``.
    ``torch.utils.swap_tensors`` refuses the weights until :meth:`release`.

    Warning:
        A weight that is written without moving its version counter is used with its **old value**
        until :func:`drop`: writes through ``.data`` or numpy, by a CUDA graph, by
        collectives, by optimizers that are not a ``torch.optim.Optimizer`` (after a ``step`` of
        one that is, its weights are cast again).

    Args:
        weights: A module (its parameters), a tensor or an iterable of tensors.

    Raises:
        TypeError: ``weights`` is something else.
    """

    def __init__(self, weights: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Starts keeping casts, at once."""
        tensors = weights_of("casts.keep", weights)
        super().__init__(_C.acquire_kept_casts(tensors), _C.release_kept_casts)
