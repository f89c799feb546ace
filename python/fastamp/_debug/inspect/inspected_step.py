# SPDX-License-Identifier: Apache-2.0
"""One step under inspection: from its first op to the end of the optimizer's step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from fastamp._debug.check.cause import CauseRules
from fastamp._debug.check.model_rules import look_at_models
from fastamp._debug.check.op_rules import OpRules
from fastamp._debug.check.rules import Findings
from fastamp._debug.check.step_rules import StepRules
from fastamp._debug.inspect.inspect_report import InspectReport
from fastamp._debug.inspect.inspect_rows import (
    GradientRow,
    Rows,
    Title,
    WeightRow,
    gradient_row,
    weight_row,
)
from fastamp._debug.report import today
from fastamp._debug.watch.calls import CallListener, listening
from fastamp._debug.watch.model_names import ModelNames
from fastamp._debug.watch.modules import ModulePath
from fastamp._debug.watch.op_calls import OpCall, OpWatcher, watched
from fastamp._debug.watch.origins import Origins
from fastamp._debug.watch.twin import Fp32Twin
from fastamp._util.tool_guard import ToolGuard

__all__ = ["InspectedStep"]


class InspectedStep(CallListener, OpWatcher):
    """Watches a step of a program.

    Args:
        models: What is trained.
        optimizers: Its optimizers.
        scalers: Its gradient scalers.
        findings: Where the findings of the linter go.
        names: Names modules and parameters.
        guard: Of the tool.
        twin: Whether the step is computed in fp32 beside; without it there are no errors.
        number: Of the step, for what is said of it.
        program: What is run, for the title; may be empty.
    """

    def __init__(
        self,
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        scalers: list[Any],
        findings: Findings,
        names: ModelNames,
        guard: ToolGuard,
        twin: bool = True,
        number: int = 0,
        program: str = "",
    ) -> None:
        """Notes what to watch."""
        self.guard = guard
        self._models, self._optimizers, self._scalers = models, optimizers, scalers
        self._findings, self._names = findings, names
        self._twin = Fp32Twin() if twin else None
        self._rows = Rows()
        self._ops = OpRules(findings)
        self._events = StepRules(findings, self._ops, scalers, optimizers, guard)
        self._title = Title(program=program, step=number, date=today())
        self._origins = Origins(names)
        self._causes = CauseRules(findings, self._origins, guard, number)
        self._path = ModulePath(names, guard)
        # By the identity of parameters, with them: two models may have equal names.
        self._gradients: dict[int, tuple[torch.Tensor, GradientRow]] = {}
        self._weights: dict[int, tuple[torch.Tensor, WeightRow]] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._stepped: set[int] = set()
        self._scale = 1.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[ModulePath]:
        """Watches what this thread runs inside the block, backward passes on any thread too."""
        with (
            watched(self._models, self, self._names, self.guard) as (path, recorder),
            self._events.followed(this_thread=True),
            listening(self, this_thread=True),
            listening(self._causes, this_thread=True),
        ):
            self._path = path
            try:
                yield path
            finally:
                self._twin = None  # It holds every tensor of the step.
                self._before.clear()
        self.guard.run(lambda: self._events.conclude(recorder.rows()))

    def report(self) -> InspectReport:
        """Returns what was seen, after the block."""
        look_at_models(self._models, self._optimizers, self._names, self._findings)
        skipped = any(getattr(scaler, "step_was_skipped", False) for scaler in self._scalers)
        order = [id(parameter) for _, parameter in self._names.parameters()]
        return InspectReport(
            ops=self._rows.op_rows(),
            gradients=tuple(self._gradients[i][1] for i in order if i in self._gradients),
            weights=()
            if skipped
            else tuple(self._weights[i][1] for i in order if i in self._weights),
            skipped=skipped,
            loss_scale=self._rows.loss_scale(self._scale),
            check=self._findings.report(has_step=True),
            title=dataclasses.replace(self._title, dtype=self._rows.dtype_of_products()),
        )

    def before(self, call: OpCall) -> Any:
        """Applies rules, and runs the twin."""
        self._events.see(call)
        self._ops.before(call)
        return (None, None) if self._twin is None else self._twin.before(call)

    def after(self, call: OpCall, result: Any, noted: Any) -> None:
        """Applies rules, and adds the call to the rows."""
        self._ops.after(call, result)
        self._events.seen(call, result)
        self._origins.see(call, result)
        on_same, on_twin = noted if self._twin is None else self._twin.after(call, result, noted)
        self._rows.add(call, result, on_same, on_twin)

    def after_backward(self) -> None:
        """Notes gradients as backward leaves them."""
        for scaler in self._scalers:
            if scaler.is_enabled():
                self._scale = float(scaler.get_scale())
        with torch._C._DisableTorchDispatch():
            for name, parameter in self._names.parameters():
                if parameter.grad is not None and self._is_of_step(parameter):
                    self._note_gradient(name, parameter)

    def _is_of_step(self, parameter: torch.Tensor) -> bool:
        """Whether its step is to come, and no model has it that another thread trains."""
        belongs = id(parameter) in self._path.parameters
        belongs |= self._names.of_parameter(parameter) is None
        return belongs and id(parameter) not in self._stepped

    def _note_gradient(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        twin = None if self._twin is None else self._twin.value_of(gradient)
        row = gradient_row(name, gradient, twin)
        if row is not None:
            self._gradients[id(parameter)] = parameter, row

    def before_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:  # noqa: ARG002
        """Notes the weights before the step."""
        self._path.enter(f"{type(optimizer).__name__}.step")
        with torch._C._DisableTorchDispatch():
            for parameter in _stepped_by(optimizer):
                if parameter.grad is not None and id(parameter) in self._gradients:
                    self._before[id(parameter)] = parameter.detach().clone()

    def after_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:  # noqa: ARG002
        """Notes what the step did to them."""
        self._path.leave()
        self._stepped |= {id(parameter) for parameter in _stepped_by(optimizer)}
        with torch._C._DisableTorchDispatch():
            for parameter in _stepped_by(optimizer):
                before = self._before.pop(id(parameter), None)
                if before is not None and parameter.grad is not None:
                    name = self._gradients[id(parameter)][1].name
                    row = weight_row(name, before, parameter.detach(), parameter.grad)
                    self._weights[id(parameter)] = parameter, row

    def after_scaler_step(self, scaler: Any, optimizer: Any) -> None:  # noqa: ARG002
        """Another backward pass is not for the weights of a step that was skipped."""
        if isinstance(optimizer, torch.optim.Optimizer):
            self._stepped |= {id(parameter) for parameter in _stepped_by(optimizer)}


def _stepped_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
