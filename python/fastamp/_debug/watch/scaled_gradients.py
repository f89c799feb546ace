# SPDX-License-Identifier: Apache-2.0
"""Finds the gradients that carry a loss scale."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fastamp._debug.watch.backward_passes import BackwardPasses
from fastamp._debug.watch.calls import CallListener
from fastamp._debug.watch.modules import local_of
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
    """The scaler of its loss, and the gradients before it."""

    scaler: Any
    before: dict[int, tuple[int, int] | None]


class _Scaled(NamedTuple):
    """A gradient of a loss that a scaler has multiplied, or what a program made of it.

    Attributes:
        tensor: Kept, so that no other takes its memory.
        scaler: Multiplied the loss.
        is_divided: Whether the scale was taken out.
    """

    tensor: torch.Tensor
    scaler: Any
    is_divided: bool


class ScaledGradients(CallListener):
    """Follows losses that scalers have multiplied into the gradients of parameters.

    And those into the tensors that a program makes of them, by the address of their elements.

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
        self._scaled: dict[int, _Scaled] = {}
        self._passes: dict[int, _BackwardPass] = {}  # by thread
        self._running = BackwardPasses()

    def after_scale(self, scaler: Any, scaled: Any) -> None:
        """Notes the node that multiplied."""
        if scaler.is_enabled():
            for tensor in scaled if isinstance(scaled, (list, tuple)) else [scaled]:
                if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                    self._nodes.append((tensor.grad_fn, scaler))

    def before_backward(self, tensors: Any) -> None:
        """Notes which gradients there are."""
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self._keep_gradients()
        self._running.begin()
        before = {id(p): _state(p) for p in self._parameters()}
        self._passes[threading.get_ident()] = _BackwardPass(self.scaler_of(roots), before)

    def after_backward(self) -> None:
        """Notes that what has changed carries the loss's scale; new ones of a loss without do not.

        Nothing is said of what changed while passes of two threads ran.
        """
        after = [(p, p.grad, _state(p)) for p in self._parameters()]
        is_alone = self._running.end()
        this = self._passes.pop(threading.get_ident(), None)
        if this is None:
            return  # It began before anyone listened.
        for parameter, gradient, state in after:
            before = this.before.get(id(parameter))
            if gradient is None or state is None or state == before:
                continue
            known = self._scaled.get(_memory(gradient))
            if this.scaler is not None and is_alone:
                self._scaled[_memory(gradient)] = _Scaled(gradient, this.scaler, is_divided=False)
            elif known is not None and (
                known.is_divided or before is None or before[0] != state[0] or not is_alone
            ):
                del self._scaled[_memory(gradient)]

    def after_unscale(self, scaler: Any, optimizer: Any) -> None:
        """They carry no scale any more, also after a pass that is not the step's."""
        if scaler.is_enabled():
            for known in self._known_of(optimizer):
                self._scaled[_memory(known.tensor)] = known._replace(is_divided=True)

    def before_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:
        """Looks whether the step is called past the scaler."""
        self.stepped = None
        for scaler in [] if by_scaler else self._scalers_of(optimizer):
            if carries_scale(scaler, optimizer):
                self.stepped, self.scale = optimizer, float(scaler.get_scale())

    def after_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:  # noqa: ARG002
        """Forgets graphs and gradients."""
        self._nodes.clear()
        for parameter in _parameters_of(optimizer):
            if parameter.grad is not None:
                self._scaled.pop(_memory(parameter.grad), None)
        self._keep_gradients()

    def after_update(self, scaler: Any) -> None:  # noqa: ARG002
        """Forgets graphs."""
        self._nodes.clear()

    def multiplied(
        self,
        given: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        factor: Callable[[], float] | None,
    ) -> None:
        """Looks whether a program takes the scale out of gradients by itself.

        Args:
            given: Tensors that are multiplied or copied.
            made: What becomes of each: the same tensor, if in place.
            factor: By what; asked for if there are such gradients among them. None: copied.
        """
        for tensor, result in zip(given, made, strict=False) if self._scaled else ():
            known = self._scaled.get(_memory(tensor))
            if known is not None:
                scale = float(known.scaler.get_scale())
                divides = factor is not None and abs(factor() * scale - 1.0) < 1e-3
                is_divided = known.is_divided or divides
                self._scaled[_memory(result)] = _Scaled(result, known.scaler, is_divided)

    def is_divided(self, optimizer: Any) -> bool:
        """Whether the scale was taken out of an optimizer's gradients, and they are still there."""
        return any(known.is_divided for known in self._known_of(optimizer))

    def _known_of(self, optimizer: Any) -> list[_Scaled]:
        gradients = [p.grad for p in _parameters_of(optimizer) if p.grad is not None]
        return [self._scaled[_memory(g)] for g in gradients if _memory(g) in self._scaled]

    def _keep_gradients(self) -> None:
        """Forgets tensors that are no parameter's gradient."""
        gradients = {_memory(p.grad) for p in self._parameters() if p.grad is not None}
        self._scaled = {at: known for at, known in self._scaled.items() if at in gradients}

    def _parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in list(self._optimizers):
            yield from _parameters_of(optimizer)

    def _scalers_of(self, optimizer: Any) -> list[Any]:
        found = [each.scaler for each in self._known_of(optimizer) if not each.is_divided]
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
    local = local_of(tensor)
    has_address = local is not None and local.layout == torch.strided and not local.is_meta
    return (local.data_ptr() if local is not None and has_address else 0) or id(tensor)


def _parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
