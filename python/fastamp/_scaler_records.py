"""What belongs to one optimizer, or one iteration, of a gradient scaler."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

import fastamp._C as _C

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class OptimizerRecord:
    """What a scaler keeps about one optimizer from step to step; it does not keep it alive."""

    __slots__ = (
        "any_foreign",
        "clip_coef",
        "clip_value",
        "foreign_counts",
        "fuse_tried",
        "inv_scale",
        "mark",
        "memory",
        "norm",
        "norm_factor",
        "optimizer",
        "skipped",
    )

    def __init__(self, optimizer: Any, forget: Callable[[Any], Any]) -> None:
        """Makes an empty record; ``forget`` is called when the optimizer is gone."""
        try:
            self.optimizer: Callable[[], Any] = weakref.ref(optimizer, forget)
        except TypeError:  # A class with __slots__ and no __weakref__.
            self.optimizer = lambda: optimizer
        self.memory = _C.OptimizerPasses()
        self.skipped = False
        self.fuse_tried = False
        self.start_iteration()

    def start_iteration(self) -> None:
        """Drops what belongs to one iteration, and with it the references to gradients."""
        self.memory.latest = None
        self.foreign_counts: list[tuple[list[Tensor], Tensor]] = []
        self.mark: object = None  # The scaler's at the pass; it has another one after scale().
        self.inv_scale: Tensor | None = None  # Of a read-only pass: still to be applied.
        self.norm: Tensor | None = None
        self.any_foreign = False  # Then the pass saw only some of the gradients.
        self.norm_factor: Tensor | None = None  # Of a pass over gradients that stay scaled.
        self.clip_coef: Tensor | None = None
        self.clip_value: float | None = None

    @property
    def gradient_pass(self) -> _C.PassResult | None:
        """The last pass of this iteration."""
        return self.memory.latest

    @gradient_pass.setter
    def gradient_pass(self, gradient_pass: _C.PassResult) -> None:
        self.memory.latest = gradient_pass

    def scaled_anew(self, optimizer: Any, mark: object) -> bool:
        """Whether a new backward pass has made all gradients that ``optimizer`` has now.

        So it is if none of them is one that the pass saw and ``scale`` was called since.
        """
        seen = self.gradient_pass
        if seen is None or self.any_foreign or self.mark is None or self.mark is mark:
            return False
        return _C.saw_none(seen, optimizer)

    def unscaled_norm(self) -> Tensor | None:
        """Returns the norm of this iteration's gradients if a pass has summed it."""
        if self.norm is not None:
            return self.norm
        known = self.gradient_pass
        if known is None or self.any_foreign or not known.has_norm:
            return None
        norm = known.total_norm(torch.float32)
        return norm if self.norm_factor is None else norm * self.norm_factor.to(norm.device)

    def norm_is_that_of_its_pass(self) -> bool:
        """Whether :meth:`unscaled_norm` is the pass's norm as it is, if it has one."""
        return self.norm is None and not self.any_foreign and self.norm_factor is None

    def counts(self) -> list[Any]:
        """Returns where this iteration's inf and NaN were counted."""
        counts: list[Any] = [] if self.gradient_pass is None else self.gradient_pass.counts
        return counts + self.foreign_counts


Outcome = tuple[OptimizerRecord, list["Tensor"], list[Any]]  # flags, counts
Captured = tuple["Tensor", list[Outcome]]


class Iteration:
    """One call of update, until its values have arrived on the host."""

    __slots__ = ("number", "optimizers", "readback", "scale_used")

    def __init__(
        self,
        number: int,
        scale: Tensor,
        optimizers: list[Outcome],
    ) -> None:
        """Starts the readback; ``optimizers`` has (record, flags, counts) of each."""
        self.number = number
        self.optimizers = [(record, len(flags), counts) for record, flags, counts in optimizers]
        flat = [flag for _, flags, _ in optimizers for flag in flags]
        self.readback = _C.Readback([scale, *flat])
