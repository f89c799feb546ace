# SPDX-License-Identifier: Apache-2.0
"""What the native core of a gradient scaler asks of Python."""

from __future__ import annotations

import weakref
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from fastamp import _clip
from fastamp._mesh_norm import norm_over_ranks, shard_groups
from fastamp._scaler import subclasses
from fastamp._scaler.reports import StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.amp.grad_scaler import GradScaler


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Returns the parameters of all groups."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def norm_over(optimizer: Any, mesh: Any, norm_type: float) -> Callable[[], Tensor]:
    """Returns what computes the norm of an optimizer's gradients over several ranks."""
    groups = shard_groups("clip_grad_norm_", mesh, norm_type)
    return lambda: norm_over_ranks("clip_grad_norm_", parameters_of(optimizer), groups, norm_type)


class CoreHooks:
    """Called by csrc/python_optimizer.cpp and csrc/bind_scaler.cpp. Does not keep the scaler alive.

    A class of its own, so that the core, which the scaler owns, holds no reference back to it.
    """

    def __init__(
        self,
        scaler: GradScaler,
        move_state: Callable[[int, int], None],
        tell_skip: Callable[[Any, StepRecord], None],
    ) -> None:
        """Remembers, weakly, the scaler and two methods: to rename a state, to tell of a skip."""
        self._scaler: weakref.ref[Any] = weakref.ref(scaler)
        self._move_state = weakref.WeakMethod(move_state)
        self._tell_skip = weakref.WeakMethod(tell_skip)

    def unscale(self, optimizer: Any) -> None:
        """Unscales at once, through a user's ``unscale_`` if there is one."""
        scaler = self._scaler()
        assert scaler is not None
        scaler.unscale_(optimizer)

    def all_reduce(self, flag: Tensor) -> None:
        """Raises a flag on every rank if one rank has raised it."""
        scaler = self._scaler()
        assert scaler is not None
        torch.distributed.all_reduce(
            flag, torch.distributed.ReduceOp.MAX, group=scaler.process_group
        )

    def move_state(self, key: int, free: int) -> None:
        """An optimizer is gone: another may come to have its address, what it did still counts."""
        move = self._move_state()
        if move is not None:
            move(key, free)

    def tell_skip(
        self, optimizer: Any, step: int, scale: float, norm: float, growth_tracker: int
    ) -> None:
        """A step of an optimizer, ``None`` if that is gone, was skipped."""
        tell = self._tell_skip()
        if tell is not None:
            tell(optimizer, StepRecord(step, scale, True, norm, growth_tracker))

    norm = staticmethod(subclasses.norm_with_subclasses)
    multiply = staticmethod(subclasses.multiply_subclasses)
    check_finite = staticmethod(_clip.check_finite)

    @staticmethod
    def clamp(optimizer: Any, clip_value: float) -> None:
        """Clips gradients by value, as torch does."""
        torch.nn.utils.clip_grad_value_(parameters_of(optimizer), clip_value)
