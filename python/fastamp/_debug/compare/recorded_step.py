# SPDX-License-Identifier: Apache-2.0
"""One step that is recorded: what each op was given and returned, gradients, weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fastamp._debug.compare.record import Event, Record
from fastamp._debug.compare.sketch import Sketch, sketch_of
from fastamp._debug.watch.calls import CallListener, listening
from fastamp._debug.watch.model_names import ModelNames
from fastamp._debug.watch.modules import ModulePath
from fastamp._debug.watch.op_calls import OpCall, OpWatcher, watched
from fastamp._debug.watch.twin import Fp32Twin
from fastamp._util.tool_guard import ToolGuard

__all__ = ["RecordedStep"]


def _sketches(values: Any) -> tuple[Sketch, ...]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return tuple(sketch for each in tensors if (sketch := sketch_of(each)) is not None)


def _noise(results: Any, twins: Any) -> float:
    """The largest distance of a result from its twin, relative to it."""
    largest = 0.0
    for result, twin in zip(tree_leaves(results), tree_leaves(twins), strict=False):
        if isinstance(result, torch.Tensor) and isinstance(twin, torch.Tensor):
            own, other = result.detach().double(), twin.detach().double()
            if own.shape == other.shape and own.numel():
                size = float(torch.linalg.vector_norm(other))
                apart = float(torch.linalg.vector_norm(own - other))
                if 0.0 < apart < float("inf") and size > 0.0:
                    largest = max(largest, apart / size)
    return largest


def _unsure(gradient: torch.Tensor, twin: torch.Tensor | None) -> float:
    """The share of elements whose sign is that of a rounding error."""
    own = gradient.detach().double()
    if not own.numel():
        return 0.0
    apart = own.abs().square().mean().sqrt() * 2.0**-18
    if twin is not None and twin.shape == own.shape:
        apart = torch.maximum(apart, 2.0 * (own - twin.double()).abs())
    return float(((own.abs() <= apart) & (own != 0)).double().mean())


class RecordedStep(CallListener, OpWatcher):
    """Records a step of a program.

    Args:
        models: What is trained.
        scalers: Its gradient scalers.
        names: Names modules and parameters.
        guard: Of the tool.
        rank: Of this process, among how many.
        number: Of the step.
    """

    def __init__(
        self,
        models: list[torch.nn.Module],
        scalers: list[Any],
        names: ModelNames,
        guard: ToolGuard,
        rank: tuple[int, int],
        number: int,
    ) -> None:
        """Notes what to record."""
        self.guard = guard
        self._models, self._scalers, self._names = models, scalers, names
        self._rank, self._number = rank, number
        self._twin = Fp32Twin()
        self._events: list[Event] = []
        self._has_begun = False
        self._is_past_backward = False
        self._inside = 0  # Of optimizers' steps, whose ops are theirs.
        self._scale = 1.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[ModulePath]:
        """Records what this thread runs inside the block, backward passes on any thread too."""
        with (
            watched(self._models, self, self._names, self.guard) as (path, _),
            listening(self, this_thread=True),
        ):
            yield path
        self._twin = Fp32Twin()  # It holds every tensor of the step.
        self.guard.run(self._note_parameters, "end")

    def report(self) -> Record:
        """Returns what was recorded, after the block."""
        skipped = any(getattr(scaler, "step_was_skipped", False) for scaler in self._scalers)
        rank, ranks = self._rank
        events = tuple(self._events)
        version = torch.__version__
        return Record(version, rank, ranks, self._number, self._scale, bool(skipped), events)

    def _note_parameters(self, kind: str) -> None:
        with torch._C._DisableTorchDispatch():
            for name, parameter in self._names.parameters():
                self._events.append(Event(kind, name, outputs=_sketches(parameter)))

    def _is_left_out(self, call: OpCall) -> bool:
        """Whether a call says nothing of its own, or may be another with other options."""
        if call.module:
            self._is_past_backward = False
        # Unscaling, clipping and the optimizer: the update shows what they did.
        after = self._inside or (self._is_past_backward and not call.backward)
        tensors = [getattr(scaler, "_scale", None) for scaler in self._scalers]
        scales = {scale.data_ptr() for scale in tensors if isinstance(scale, torch.Tensor)}
        is_scaling = any(tensor.data_ptr() in scales for tensor in call.tensors)
        random = torch.Tag.nondeterministic_seeded in call.func.tags
        # Out of nothing, or of a tensor's shape alone.
        is_made = not random and (not call.tensors or "empty" in call.op or "_like" in call.op)
        # Another dtype has other casts and views.
        return bool(after or is_scaling or is_made or call.is_view or call.is_cast)

    def before(self, call: OpCall) -> Any:
        """Looks at what an op is given, before it may write there."""
        if not self._has_begun:
            self._has_begun = True
            self._note_parameters("start")
        if self._is_left_out(call):
            return None, self._twin.before(call)
        return _sketches((call.args, call.kwargs)), self._twin.before(call)

    def after(self, call: OpCall, result: Any, noted: Any) -> None:
        """Records the call."""
        inputs, twins = noted
        _, on_twin = self._twin.after(call, result, twins)
        if inputs is None:
            return
        self._events.append(
            Event(
                "op",
                call.module,
                call.op,
                call.backward,
                inputs,
                _sketches(call.written if result is None else result),
                _noise(result, on_twin),
                torch.Tag.nondeterministic_seeded in call.func.tags,
            )
        )

    def after_backward(self) -> None:
        """Records gradients as backward leaves them."""
        self._is_past_backward = True
        for scaler in self._scalers:
            if scaler.is_enabled():
                self._scale = float(scaler.get_scale())
        with torch._C._DisableTorchDispatch():
            for name, parameter in self._names.parameters():
                if parameter.grad is not None:
                    twin = self._twin.value_of(parameter.grad)
                    noise = 0.0 if twin is None else _noise(parameter.grad, twin)
                    sketches = _sketches(parameter.grad)
                    unsure = _unsure(parameter.grad, twin)
                    event = Event("gradient", name, outputs=sketches, noise=noise, unsure=unsure)
                    self._events.append(event)

    def before_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:  # noqa: ARG002
        """Ignores what runs now: it shows in the weights after it."""
        self._inside += 1

    def after_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:  # noqa: ARG002
        """The optimizer's ops have ended."""
        self._inside -= 1
