# SPDX-License-Identifier: Apache-2.0
"""The rules on what a program does with gradient scalers, and in which order."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fastamp._debug.check.rules import Findings
from fastamp._debug.watch.backward_passes import BackwardPasses
from fastamp._debug.watch.calls import CallListener
from fastamp._debug.watch.modules import address, local_of
from fastamp._debug.watch.op_calls import OpCall
from fastamp._debug.watch.scaled_gradients import ScaledGradients, carries_scale
from fastamp._util.tool_guard import ToolGuard

__all__ = ["OrderRules"]

# Ops with which a program reads a number, such as to decide about a step.
_READS = ("_local_scalar_dense", "is_nonzero", "equal")
_STATE_OF_SCALER = {"scale", "growth_factor", "backoff_factor"}


@dataclasses.dataclass
class _Gradient:
    """Sum: what has been added up in the gradient of a parameter.

    Attributes:
        tensor: The gradient.
        losses: Whether losses that a scaler has multiplied, and others, are in it.
        is_unscaled: Whether a scaler has divided it since.
    """

    tensor: torch.Tensor
    losses: set[bool]
    is_unscaled: bool = False


@dataclasses.dataclass
class _Optimizer:
    """State: what has been done with the gradients of an optimizer since its last step.

    Attributes:
        unscaled_by: The scaler that has divided them.
        is_read: Whether the program has read a number since.
        stepped_by: The scaler that has stepped them, and no backward pass was since.
        scalers: Those that have ever stepped it.
        new: How many of these were made for a step each.
    """

    unscaled_by: Any = None
    is_read: bool = False
    stepped_by: Any = None
    scalers: list[Any] = dataclasses.field(default_factory=list)
    new: int = 0


class _Here(threading.local):
    """State of a thread.

    Attributes:
        root_is_scaled: Whether the loss of its backward pass carries a scale.
        before: The gradients that there were before that, and their versions.
        is_stepping: Whether a scaler steps.
    """

    root_is_scaled = False
    is_stepping = False

    def __init__(self) -> None:
        self.before: dict[int, tuple[torch.Tensor, int]] = {}


class OrderRules(CallListener):
    """Follows scalers, their optimizers and gradients inside a block.

    Args:
        findings: Where findings go.
        scaled: Which losses a scaler has multiplied.
        optimizers: Those of the program; may grow.
        guard: Of the tool.
    """

    def __init__(
        self,
        findings: Findings,
        scaled: ScaledGradients,
        optimizers: list[torch.optim.Optimizer],
        guard: ToolGuard,
    ) -> None:
        """Knows of no call."""
        self.guard = guard
        self._findings, self._scaled, self._optimizers = findings, scaled, optimizers
        self._gradients: dict[int, _Gradient] = {}
        self._here = _Here()
        self._backwards = BackwardPasses()
        self._had_gradients: set[int] = set()
        self._states: dict[int, _Optimizer] = {}
        self._seen_scalers: list[Any] = []
        self._scale_of_scalers: dict[int, float] = {}
        self._by_hand: set[int] = set()
        self._penalties: dict[int, float] = {}
        self._saved = [0, 0]

    # Losses.

    def before_scale(self, scaler: Any, outputs: Any) -> None:
        """The rule on losses that are scaled twice."""
        self._here.is_stepping = False
        roots = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        self._look_at_penalty(roots)
        if scaler.is_enabled() and self._scaled.scaler_of(roots) is not None:
            self._add("loss-scaled-twice", scaler, "its loss was multiplied by a scale before")

    def after_scale(self, scaler: Any, scaled: Any) -> None:  # noqa: ARG002
        """Notes the scale."""
        if scaler.is_enabled() and getattr(scaler, "_scale", None) is not None:
            self._scale_of_scalers[id(scaler)] = float(scaler.get_scale())

    def before_backward(self, tensors: Any) -> None:
        """Notes the gradients that there are, and whether the loss is scaled."""
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self._look_at_penalty(roots)
        self._here.root_is_scaled = self._scaled.scaler_of(roots) is not None or any(
            address(root) in self._by_hand for root in roots if isinstance(root, torch.Tensor)
        )
        self._backwards.begin()
        self._here.before = {
            id(p): (p.grad, p.grad._version) for p in self._parameters() if p.grad is not None
        }

    def after_backward(self) -> None:
        """The rule on gradients that are added to others; notes what they are made of."""
        changed: set[int] = set()
        after = []
        for parameter in self._parameters():
            gradient = parameter.grad
            before = self._here.before.get(id(parameter))
            if gradient is not None and (before is None or not _is_same(before, gradient)):
                after.append((parameter, gradient, before))
        is_alone = self._backwards.end()
        for parameter, gradient, before in after:
            changed.add(id(parameter))
            if not is_alone:  # Whose it is is not known.
                self._gradients.pop(id(parameter), None)
                continue
            known = self._gradients.get(id(parameter))
            if known is None or before is None or known.tensor is not before[0]:
                known = self._gradients[id(parameter)] = _Gradient(gradient, set())
            elif known.is_unscaled and self._here.root_is_scaled:
                self._findings.add(
                    "unscale-inside-accumulation",
                    "backward()",
                    "gradients that unscale_() has divided get others that carry the scale",
                )
                known.is_unscaled = False
            known.tensor = gradient
            known.losses.add(self._here.root_is_scaled)
            if id(parameter) not in self._had_gradients and _has_nonzero(gradient):
                self._had_gradients.add(id(parameter))
        for optimizer in self._optimizers:
            if any(id(p) in changed for p in _parameters_of(optimizer)):
                self._state(optimizer).stepped_by = None
        self._here.before = {}

    def after_gradients(self, outputs: Any, gradients: Any, create_graph: bool) -> None:
        """Notes scaled gradients from which a penalty may be made."""
        roots = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        scaler = self._scaled.scaler_of(roots) if create_graph else None
        if scaler is not None and float(scaler.get_scale()) != 1.0:
            for leaf in tree_leaves(gradients):
                if isinstance(leaf, torch.Tensor) and address(leaf):
                    self._penalties[address(leaf)] = float(scaler.get_scale())

    def _look_at_penalty(self, roots: list[Any]) -> None:
        for root in roots:
            scale = self._penalties.get(address(root)) if isinstance(root, torch.Tensor) else None
            if scale is not None:
                what = f"made of gradients times {scale:g}"
                self._findings.add("scaled-gradient-penalty", "the loss", what)

    def see(self, call: OpCall, result: Any) -> None:
        """Looks at an op that has run."""
        if call.op in _READS:
            for state in self._states.values():
                state.is_read = True
        if call.backward or not (self._penalties or self._scale_of_scalers):
            return
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self._follow_penalty(call, made)
        if made and made[0].dim() == 0:
            given = call.tensors
            is_scaled = any(address(t) in self._by_hand for t in given if t.dim() == 0)
            if is_scaled or (call.op == "mul.Tensor" and self._is_scale(call)):
                self._by_hand.add(address(made[0]))
            else:
                self._by_hand.discard(address(made[0]))

    def _is_scale(self, call: OpCall) -> bool:
        """Whether a program multiplies a loss by the scale itself."""
        numbers = [
            float(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
            for leaf in tree_leaves((call.args, call.kwargs))
            if isinstance(leaf, (int, float))
            or (isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.device.type == "cpu")
        ]
        return any(scale in numbers for scale in self._scale_of_scalers.values())

    def _follow_penalty(self, call: OpCall, made: list[torch.Tensor]) -> None:
        if not self._penalties:
            return
        scales = [
            self._penalties[address(t)] for t in call.tensors if address(t) in self._penalties
        ]
        divided = bool(scales) and call.op.partition(".")[0] in _DIVISIONS
        if divided and _is_inverse(call, scales[0]):
            scales = []
        for tensor in made:
            if scales:
                self._penalties[address(tensor)] = scales[0]
            elif not any(tensor is given for given in call.tensors) or divided:
                self._penalties.pop(address(tensor), None)

    # Scalers and optimizers.

    def before_unscale(self, scaler: Any, optimizer: Any) -> None:
        """The rules on what is about to be divided."""
        if not self._here.is_stepping and carries_scale(scaler, optimizer):
            self._look_at_losses(scaler, optimizer)
            if self._scaled.is_divided(optimizer):
                what = f"by 1/{scaler.get_scale():g}, and once more by the scaler"
                self._add("gradients-divided-twice", optimizer, what)

    def after_unscale(self, scaler: Any, optimizer: Any) -> None:
        """Notes that they are divided."""
        if not scaler.is_enabled():
            return
        state = self._state(optimizer)
        state.unscaled_by, state.is_read = scaler, False
        for parameter in _parameters_of(optimizer):
            known = self._gradients.get(id(parameter))
            if known is not None and known.tensor is parameter.grad:
                known.is_unscaled = True

    def _look_at_losses(self, scaler: Any, optimizer: Any) -> None:
        """Whether the scaler divides gradients of losses that it has not multiplied."""
        known = [self._gradients.get(id(p)) for p in _parameters_of(optimizer)]
        losses = [each.losses for each in known if each is not None]
        if not any(False in each for each in losses):
            return
        if any(True in each for each in losses):
            what = f"of others, times {scaler.get_scale():g}, by the same scaler step"
            what = f"gradients of a loss without the scale and {what}"
            self._add("one-loss-unscaled", optimizer, what)
        else:
            what = f"gradients are divided by {scaler.get_scale():g}, and carry no scale"
            self._add("loss-not-scaled", optimizer, what)

    def before_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """The rules on what is stepped."""
        if not scaler.is_enabled():
            return
        self._look_at_zeroed(optimizer)
        state = self._state(optimizer)
        self.before_unscale(scaler, optimizer)  # Not all steps call it.
        self._here.is_stepping = True
        if all(each is not scaler for each in state.scalers):
            is_new = all(each is not scaler for each in self._seen_scalers)
            state.new += bool(state.scalers) and is_new
            state.scalers.append(scaler)
            if state.new > 1:
                self._add("new-scaler-each-step", optimizer, f"{state.new + 1} scalers so far")
        if all(each is not scaler for each in self._seen_scalers):
            self._seen_scalers.append(scaler)

    def after_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """Ends a step."""
        self._here.is_stepping = False
        if scaler.is_enabled():
            self._end_step(optimizer)
            self._state(optimizer).stepped_by = scaler

    def before_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:
        """The rules on steps that the scaler does not make."""
        if by_scaler:
            return
        self._look_at_zeroed(optimizer)
        state = self._state(optimizer)
        if state.stepped_by is not None:
            what = "scaler.step() has stepped these gradients already"
            self._findings.add("step-past-scaler", f"{type(optimizer).__qualname__}.step()", what)
        elif state.unscaled_by is not None and not state.is_read:
            what = "after unscale_(), and nothing was read of the gradients"
            self._findings.add("step-after-unscale", f"{type(optimizer).__qualname__}.step()", what)

    def after_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:
        """Ends a step."""
        if not by_scaler:
            self._end_step(optimizer)

    def before_update(self, scaler: Any, new_scale: Any) -> None:
        """The rule on updates within an accumulation."""
        if not scaler.is_enabled() or new_scale is not None:
            return
        if not any(state["found_inf_per_device"] for state in _states_of(scaler).values()):
            pending = [p for p in self._parameters() if id(p) in self._gradients]
            if pending:
                what = "no optimizer was unscaled or stepped since the last update()"
                self._findings.add("unscale-inside-accumulation", "update()", what)

    def before_zero_grad(self, owner: Any) -> None:
        """Forgets gradients: what is zeroed is made of nothing."""
        is_module = isinstance(owner, torch.nn.Module)
        for parameter in owner.parameters() if is_module else _parameters_of(owner):
            self._gradients.pop(id(parameter), None)

    def _look_at_zeroed(self, optimizer: Any) -> None:
        had = [p for p in _parameters_of(optimizer) if id(p) in self._had_gradients]
        if had and not any(p.grad is not None and _has_nonzero(p.grad) for p in had):
            what = "all are 0 or None, and backward() had made others"
            self._add("gradients-zeroed", optimizer, what)

    def _end_step(self, optimizer: Any) -> None:
        state = self._state(optimizer)
        state.unscaled_by, state.is_read = None, False
        for parameter in _parameters_of(optimizer):
            self._gradients.pop(id(parameter), None)
            self._had_gradients.discard(id(parameter))
        self._penalties.clear()

    # What is written.

    def before_save(self, what: Any) -> None:
        """Notes checkpoints of optimizers and scalers."""
        for mapping in _mappings(what):
            keys = set(mapping)
            self._saved[0] += {"state", "param_groups"} <= keys
            self._saved[1] += keys >= _STATE_OF_SCALER

    def conclude(self, scalers: list[Any]) -> None:
        """The rule on checkpoints."""
        enabled = [s for s in scalers if s.is_enabled() and getattr(s, "_scale", None) is not None]
        if enabled and self._saved[0] and not self._saved[1]:
            what = f"{self._saved[0]} states of optimizers"
            self._add("checkpoint-without-scaler", "torch.save()", what)

    def _add(self, rule: str, where: Any, what: str) -> None:
        place = where if isinstance(where, str) else type(where).__qualname__
        self._findings.add(rule, place, what)

    def _state(self, optimizer: Any) -> _Optimizer:
        return self._states.setdefault(id(optimizer), _Optimizer())

    def _parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in list(self._optimizers):
            yield from _parameters_of(optimizer)


_DIVISIONS = ("mul", "mul_", "div", "div_", "_foreach_mul", "_foreach_mul_", "_foreach_div")


def _is_inverse(call: OpCall, scale: float) -> bool:
    """Whether a product or quotient takes a scale, or its square, out."""
    by: Any = call.args[1] if len(call.args) > 1 else 0.0
    if isinstance(by, (list, tuple)):
        by = by[0] if by else 0.0
    if isinstance(by, torch.Tensor) and by.numel() != 1:
        by = call.args[0]  # 1/scale * gradient
    if isinstance(by, torch.Tensor) and by.numel() != 1:
        return False
    factor = abs(float(by))
    factor = (1.0 / factor if factor else 0.0) if "div" in call.op else factor
    return any(abs(factor * power - 1.0) < 1e-3 for power in (scale, scale * scale))


def _parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def _states_of(scaler: Any) -> dict[int, Any]:
    states: dict[int, Any] = vars(scaler)["_per_optimizer_states"]  # torch's name, and fastamp's
    return states


def _is_same(before: tuple[torch.Tensor, int], gradient: torch.Tensor) -> bool:
    return before[0] is gradient and before[1] == gradient._version


def _has_nonzero(gradient: torch.Tensor) -> bool:
    """Whether a gradient is not 0, on this rank; of what cannot be read it is taken to be so."""
    local = local_of(gradient)
    return local is None or local.layout != torch.strided or local.is_meta or bool(local.any())


def _mappings(tree: Any, depth: int = 0) -> Iterator[dict[Any, Any]]:
    if isinstance(tree, dict) and depth < 4:
        yield tree
        for value in tree.values():
            yield from _mappings(value, depth + 1)
