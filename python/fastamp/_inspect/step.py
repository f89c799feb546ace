# SPDX-License-Identifier: Apache-2.0
"""One step under inspection: from its first op to the end of the optimizer's step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from fastamp._check.events import StepRules
from fastamp._check.ops import OpRules
from fastamp._check.rules import Findings
from fastamp._check.static import look_at_model, look_at_optimizer, names_of_parameters
from fastamp._inspect.report import InspectReport
from fastamp._inspect.rows import GradientRow, Rows, WeightRow, gradient_row, weight_row
from fastamp._inspect.twin import Fp32Twin
from fastamp._patches import Patches
from fastamp._watch.modules import ModulePath
from fastamp._watch.op_calls import OpCall, watched

__all__ = ["InspectedStep"]


class InspectedStep:
    """Watches a step of a program.

    Args:
        models: What is trained.
        optimizers: Its optimizers.
        scalers: Its gradient scalers.
        findings: Where the findings of the linter go.
        twin: Whether the step is computed in fp32 beside; without it there are no errors.
    """

    def __init__(
        self,
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        scalers: list[Any],
        findings: Findings,
        twin: bool = True,
    ) -> None:
        """Notes what to watch."""
        self._models, self._optimizers, self._scalers = models, optimizers, scalers
        self._findings = findings
        self._twin = Fp32Twin() if twin else None
        self._rows = Rows()
        self._ops = OpRules(findings)
        self._events = StepRules(findings, self._ops, scalers, optimizers)
        self._gradients: dict[str, GradientRow] = {}
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scale = 1.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[ModulePath]:
        """Watches what runs inside the block."""
        patches = Patches()
        with watched(self._models, self._run) as (path, recorder), self._events.followed():
            patches.replace(torch.autograd, "backward", self._wrapped(torch.autograd.backward))
            try:
                yield path
            finally:
                patches.undo()
                self._twin = None  # It holds every tensor of the step.
        self._events.conclude(recorder.rows())

    def report(self) -> InspectReport:
        """Returns what was seen, after the block."""
        names: dict[int, str] = {}
        for model in self._models:
            look_at_model(model, self._findings)
            names |= names_of_parameters(model)
        for optimizer in self._optimizers:
            look_at_optimizer(optimizer, names, self._findings)
        skipped = any(getattr(scaler, "step_was_skipped", False) for scaler in self._scalers)
        return InspectReport(
            ops=self._rows.op_rows(),
            gradients=tuple(self._gradients.values()),
            weights=() if skipped else tuple(self._weights()),
            skipped=skipped,
            loss_scale=self._rows.loss_scale(self._scale),
            check=self._findings.report(has_step=True),
        )

    def _run(self, call: OpCall) -> Any:
        self._events.see(call)
        self._ops.before(call)
        if self._twin is None:
            result, on_same, on_twin = call.func(*call.args, **call.kwargs), None, None
        else:
            result, on_same, on_twin = self._twin.run(call)
        self._ops.after(call, result)
        if call.module or call.backward or call.autocast is not None:
            self._rows.add(call, result, on_same, on_twin)
        return result

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._note_gradients()
            return result

        return backward

    def _note_gradients(self) -> None:
        """Gradients as backward leaves them, and the weights before the step."""
        for scaler in self._scalers:
            if scaler.is_enabled():
                self._scale = float(scaler.get_scale())
        with torch._C._DisableTorchDispatch():
            for model in self._models:
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        self._note_gradient(name, parameter)

    def _note_gradient(self, name: str, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        twin = None if self._twin is None else self._twin.value_of(gradient)
        row = gradient_row(name, gradient, twin)
        if row is not None:
            self._gradients[name] = row
            before = self._before.get(name, (parameter.detach().clone(), None))[0]
            self._before[name] = (before, gradient.detach().clone())

    def _weights(self) -> Iterator[WeightRow]:
        """Of parameters that an optimizer steps."""
        stepped = {id(p) for o in self._optimizers for g in o.param_groups for p in g["params"]}
        for model in self._models:
            for name, parameter in model.named_parameters():
                if id(parameter) in stepped and name in self._before:
                    before, gradient = self._before[name]
                    yield weight_row(name, before, parameter.detach(), gradient)
