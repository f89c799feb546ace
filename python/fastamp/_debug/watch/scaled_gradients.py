# SPDX-License-Identifier: Apache-2.0
"""Finds the gradients that carry a loss scale."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fastamp._debug.watch.calls import CallListener
from fastamp._util.tool_guard import ToolGuard

__all__ = ["ScaledGradients", "carries_scale"]

_STAGE_READY = 0
_SEARCHED_NODES = 64


def carries_scale(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scaler has not taken its scale out of what an optimizer would step, and has one."""
    if not scaler.is_enabled() or getattr(scaler, "_scale", None) is None:
        return False
    states = vars(scaler)["_per_optimizer_states"]  # torch's name, which fastamp's has, too
    state = states.get(id(optimizer))
    is_ready = state is None or state["stage"].value == _STAGE_READY
    return is_ready and float(scaler.get_scale()) != 1.0


@dataclasses.dataclass
class _BackwardPass:
    """The scaler of its loss, gradients before it, whether no other thread's ran meanwhile."""

    scaler: Any
    before: dict[int, tuple[int, int] | None]
    is_alone: bool


class ScaledGradients(CallListener):
    """Follows losses that scalers have multiplied into the gradients of parameters.

    Args:
        optimizers: Whose parameters; may grow.
        guard: Of the tool.

    Attributes:
        stepped: The optimizer whose step is running, or was the last, if it was called past the
            scaler whose scale its gradients carry; else None.
        scale: That scale.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], guard: ToolGuard) -> None:
        """Knows no scaled loss."""
        self.guard = guard
        self.stepped: Any = None
        self.scale = 1.0
        self._optimizers = optimizers
        self._nodes: list[tuple[Any, Any]] = []
        self._scaled: dict[int, tuple[torch.Tensor, Any]] = {}
        self._passes: dict[int, _BackwardPass] = {}  # by thread
        self._divided: dict[int, torch.Tensor] = {}

    def after_scale(self, scaler: Any, scaled: Any) -> None:
        """Notes the node that multiplied."""
        if scaler.is_enabled():
            for tensor in scaled if isinstance(scaled, (list, tuple)) else [scaled]:
                if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                    self._nodes.append((tensor.grad_fn, scaler))

    def before_backward(self, tensors: Any) -> None:
        """Notes which gradients there are."""
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        before = {id(p): _state(p) for p in self._parameters()}
        here = threading.get_ident()
        others = [each for thread, each in self._passes.items() if thread != here]
        for each in others:
            each.is_alone = False
        self._passes[here] = _BackwardPass(self.scaler_of(roots), before, not others)

    def after_backward(self) -> None:
        """Those that have changed carry the loss's scale; new ones of a loss without do not.

        Nothing is said of what changed while passes of two threads ran.
        """
        this = self._passes.pop(threading.get_ident(), None)
        if this is None:
            return  # It began before anyone listened.
        for parameter in self._parameters():
            state, before = _state(parameter), this.before.get(id(parameter))
            if state is None or state == before:
                continue
            self._divided.pop(id(parameter), None)
            if this.scaler is not None and this.is_alone:
                assert parameter.grad is not None
                self._scaled[id(parameter)] = (parameter.grad, this.scaler)
            elif before is None or before[0] != state[0] or not this.is_alone:
                self._scaled.pop(id(parameter), None)

    def after_unscale(self, scaler: Any, optimizer: Any) -> None:
        """They carry no scale any more, also after a pass that is not the step's."""
        for group in optimizer.param_groups if scaler.is_enabled() else ():
            for parameter in group["params"]:
                gradient, _ = self._scaled.pop(id(parameter), (None, None))
                if gradient is not None:
                    self._divided[id(parameter)] = gradient

    def before_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:
        """Looks whether the step is called past the scaler."""
        self.stepped = None
        for scaler in [] if by_scaler else self._scalers_of(optimizer):
            if carries_scale(scaler, optimizer):
                self.stepped, self.scale = optimizer, float(scaler.get_scale())

    def after_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:  # noqa: ARG002
        """Forgets graphs and gradients."""
        self._nodes.clear()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._scaled.pop(id(parameter), None)
                self._divided.pop(id(parameter), None)

    def after_update(self, scaler: Any) -> None:  # noqa: ARG002
        """Forgets graphs."""
        self._nodes.clear()

    def multiplied(self, written: Iterable[torch.Tensor], factor: Callable[[], float]) -> None:
        """Looks whether a program takes the scale out of gradients by itself.

        Args:
            written: Tensors that are multiplied.
            factor: By what; asked for if there are such gradients among them.
        """
        memories = {_memory(tensor) for tensor in written} if self._scaled else set()
        for key, (gradient, scaler) in list(self._scaled.items()):
            is_written = _memory(gradient) in memories
            if is_written and abs(factor() * float(scaler.get_scale()) - 1.0) < 1e-3:
                del self._scaled[key]
                self._divided[key] = gradient

    def is_divided(self, optimizer: Any) -> bool:
        """Whether the scale was taken out of an optimizer's gradients, and they are still there."""
        return any(
            parameter.grad is not None and self._divided.get(id(parameter)) is parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def _parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in list(self._optimizers):
            for group in optimizer.param_groups:
                yield from group["params"]

    def _scalers_of(self, optimizer: Any) -> list[Any]:
        found = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient, scaler = self._scaled.get(id(parameter), (None, None))
                if gradient is not None and parameter.grad is gradient:
                    found.append(scaler)
        return list({id(scaler): scaler for scaler in found}.values())

    def scaler_of(self, roots: list[Any]) -> Any:
        """The scaler that has multiplied one of these tensors, or what it was made from."""
        known = {id(node): scaler for node, scaler in self._nodes}
        found = [
            root.grad_fn
            for root in roots
            if isinstance(root, torch.Tensor) and root.grad_fn is not None
        ]
        for node in found:  # It grows.
            if id(node) in known:
                return known[id(node)]
            if len(found) < _SEARCHED_NODES:
                found += [following for following, _ in node.next_functions if following]
        return None


def _state(parameter: torch.Tensor) -> tuple[int, int] | None:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)


def _memory(tensor: torch.Tensor) -> int:
    return id(tensor) if tensor.layout != torch.strided else tensor.data_ptr()
