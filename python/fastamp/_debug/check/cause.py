# SPDX-License-Identifier: Apache-2.0
"""The one line that says why a step was skipped, or what is NaN."""

from __future__ import annotations

import math
from typing import Any

import torch

from fastamp._debug.check.rules import Cause, Findings
from fastamp._debug.watch.calls import CallListener
from fastamp._debug.watch.origins import Origin, Origins, has_nonfinite
from fastamp._scaler.causes import note_cause
from fastamp._util.tool_guard import ToolGuard

__all__ = ["CauseRules"]

_BY_ITSELF = "the scaler lowers it by itself"
_PENALTY = "scaled-gradient-penalty"


class CauseRules(CallListener):
    """Follows losses and gradients that are not finite to where that began.

    Args:
        findings: Where findings go.
        origins: Follows the numbers.
        guard: Of the tool.
        step: Number of the step that begins.
    """

    def __init__(
        self, findings: Findings, origins: Origins, guard: ToolGuard, step: int = 0
    ) -> None:
        """Knows of no step."""
        self.guard = guard
        self._findings, self._origins = findings, origins
        self._steps = step
        self._loss: Origin | None = None
        self._is_skip: Cause | None = None
        self._has_stepped = False
        self._penalties_seen = 0
        self._origins_before_backward = 0
        self._penalty_passes: list[range] = []  # Numbers of the origins that each has made.

    def before_backward(self, tensors: Any) -> None:
        """Notes a loss that is not finite."""
        self._origins_before_backward = self._origins.count
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        found = [origin for origin in map(self._origins.of, roots) if origin is not None]
        if found and self._loss is None:
            self._loss = min(found, key=lambda each: each.number)

    def after_backward(self) -> None:
        """Notes the pass of a loss that is made of scaled gradients."""
        penalties = self._findings.count_of(_PENALTY)
        if penalties > self._penalties_seen:
            self._penalty_passes.append(range(self._origins_before_backward, self._origins.count))
        self._penalties_seen = penalties

    def before_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """Looks at the gradients as they are."""
        self._has_stepped = False
        self._is_skip = self._cause_of(optimizer, scaler) if scaler.is_enabled() else None

    def after_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """The step was skipped: by the host, or on the device."""
        cause, self._is_skip = self._is_skip, None
        if cause is not None:
            self._note(cause, f"gradients of {type(optimizer).__name__}")
            if hasattr(scaler, "overflow_report"):
                note_cause(scaler, cause.text)
        if not self._has_stepped:
            self._end_step()

    def before_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:
        """The rule on steps that nobody skips."""
        cause = None if by_scaler else self._cause_of(optimizer, None)
        if cause is not None:
            self._note(cause, f"{type(optimizer).__name__}.step()")
            where, what = f"{type(optimizer).__name__}.step()", f"step {self._steps}"
            if not cause.is_meant:
                self._findings.add("step-without-scaler", where, what)

    def after_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:  # noqa: ARG002
        """Ends a step."""
        self._has_stepped = True
        self._end_step()

    def _end_step(self) -> None:
        self._steps += 1
        self._loss = None
        self._penalties_seen = self._findings.count_of(_PENALTY)
        self._penalty_passes.clear()
        self._origins.forget_found()

    def _note(self, cause: Cause, where: str) -> None:
        self._findings.note_cause(cause)
        if cause.rule:
            place = f"{cause.op} in {cause.module}" if cause.module else cause.op or where
            what = f"{cause.source}, step {cause.step}" if cause.source else f"step {cause.step}"
            self._findings.add(cause.rule, place, what)

    def _cause_of(self, optimizer: Any, scaler: Any) -> Cause | None:
        found: list[Origin] = [] if self._loss is None else [self._loss]
        broken = 0
        with torch._C._DisableTorchDispatch():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if has_nonfinite(parameter.grad):
                        broken += 1
                        origin = self._origins.of(parameter.grad)
                        found += [origin] if origin is not None else []
        if not broken:
            return None
        absorbed = self._origins.overflow()  # by 1/x, say: its gradient may be anything
        found += [absorbed] if absorbed is not None else []
        scale = float(scaler.get_scale()) if scaler is not None else 1.0
        outcome = "stepped with non-finite gradients" if scaler is None else "was skipped"
        origin = min(found, key=lambda each: each.number, default=None)
        rule, text = "", f"{broken} gradients had inf or NaN; no op that was seen made them"
        if origin is not None:
            rule, text = _explained(origin, scale, scaler is not None, self._is_penalty(origin))
        return Cause(
            self._steps,
            outcome,
            origin.op if origin else "",
            origin.module if origin else "",
            origin.source if origin else "",
            origin.backward if origin else False,
            rule,
            f"step {self._steps} {outcome}: {text}",
            is_meant=origin is not None and origin.is_written,
        )

    def _is_penalty(self, origin: Origin) -> bool:
        """Whether the backward pass of a penalty of scaled gradients made it in this step."""
        return any(origin.number in made for made in self._penalty_passes)


def _explained(origin: Origin, scale: float, has_scaler: bool, is_penalty: bool) -> tuple[str, str]:
    """The rule, and what happened and what helps, in words."""
    place = ", ".join(filter(None, (origin.module and f"in {origin.module}", origin.source)))
    op = f"{origin.op} {f'({place})' if place else ''}".rstrip()
    if origin.given:
        text = f"{op} was given {origin.made} by {origin.given}"
        return "nonfinite-input", f"{text}: no scale and no precision helps"
    if origin.is_written:
        return "", f"{op} was given {origin.made} as a number, by the program itself"
    direction = "backward" if origin.backward else "forward"
    inputs = "numbers and -inf, a mask" if origin.is_masked else "numbers"
    text = f"{op} made {origin.made} of finite {inputs} in {origin.dtype}, {direction}"
    if origin.is_masked:
        why = "no scale and no precision helps" if origin.backward else "a row masked as a whole"
        return "nonfinite-in-fp32", f"{text}: {why}"
    if origin.in_fp32 is not None and not math.isfinite(origin.in_fp32):
        where = "so does float32" if origin.is_low else "in float32"
        return "nonfinite-in-fp32", f"{text}; {where}: no scale and no 16-bit setting is the cause"
    if origin.backward and origin.in_fp32 is None:
        return "", text
    reached = "" if origin.in_fp32 is None else f"; float32 reaches {origin.in_fp32:.3g}"
    if origin.backward and is_penalty:  # It grows with more than the scale.
        return _PENALTY, f"{text}{reached}: the loss is made of gradients that carry the scale"
    if origin.backward and has_scaler and origin.in_fp32:
        # A gradient is in proportion to the scale.
        fitting = scale * torch.finfo(getattr(torch, origin.dtype)).max / origin.in_fp32
        if fitting >= 1.0:
            largest = 2.0 ** math.floor(math.log2(fitting))
            text += f"{reached}: a smaller loss scale helps"
            return "", f"{text}, this is finite up to {largest:g}, and {_BY_ITSELF}"
    no_scale = "no smaller loss scale helps" if has_scaler else "no loss scale helps"
    return "overflow-in-16-bits", f"{text}{reached}: {no_scale}, run it in float32"
