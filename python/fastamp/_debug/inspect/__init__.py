# SPDX-License-Identifier: Apache-2.0
"""One training step, op by op: dtypes, ranges, errors, loss scale, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastamp._debug.check import checked_arguments
from fastamp._debug.check.rules import Findings, checked_ignore
from fastamp._debug.inspect.inspect_report import InspectReport
from fastamp._debug.inspect.inspected_step import InspectedStep
from fastamp._debug.watch.model_names import ModelNames
from fastamp._util.tool_guard import ToolGuard

__all__ = ["InspectReport", "inspect"]


def inspect(
    step: Callable[[], Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    scaler: torch.amp.grad_scaler.GradScaler | None = None,
    *,
    twin: bool = True,
    ignore: Iterable[str] = (),
) -> InspectReport:
    """Runs one training step and reports what mixed precision did in it.

    ::

        report = fastamp.debug.inspect(lambda: train_step(batch), model, optimizer, scaler)
        report.print()
        report.to_html("step.html")

    That is: what ran in which dtype, in which module and why; how large numbers were; how far each
    16-bit op is from fp32, by itself and with all that came before; which gradients underflow, now
    and at other loss scales; which weights did not move; and what :func:`fastamp.debug.check`
    finds. ``python -m fastamp --inspect FILE train.py`` does this to a step of a program as it is.

    Slow on purpose: each op runs up to three times and all tensors of the step are kept, in fp32
    too. Results of the step are the same, bit for bit. In C++, ``fastamp::Inspector`` shows ranges,
    loss scale and weights.

    Args:
        step: One training step, forward pass to ``optimizer.step()`` and ``scaler.update()``, as
            the program does it. It is called once, and trains.
        model: What is trained.
        optimizer: Its optimizer, or several; without one there is nothing about weights.
        scaler: Its gradient scaler, fastamp's or torch's.
        twin: Whether to compute the step in fp32 beside. Without it there are no errors, the shares
            of gradients that underflow are those of what fp16 has left, and it takes less memory.
        ignore: Rules of :func:`fastamp.debug.check` that are not to be applied.

    Returns:
        A report with ``str``, ``print``, ``to_json`` and ``to_html``.

    Raises:
        TypeError: An argument has another type.
        ValueError: ``ignore`` names no rule; the nearest are named.
        RuntimeError: fastamp's kernels are not registered.

    Note:
        What ``step`` raises comes through, and nothing stays watched. One thread is watched, and
        the backward passes that it starts; compiled functions run eagerly meanwhile. If the
        inspection itself fails, a warning says so, and what was seen until then is returned.
    """
    if not callable(step):
        raise TypeError(f"inspect: expected step to be callable, got {type(step).__name__}")
    optimizers = checked_arguments("inspect", model, optimizer, scaler, step)
    findings = Findings(checked_ignore(ignore, "inspect"))
    guard, names = ToolGuard("fastamp.debug.inspect"), ModelNames(optimizers)
    names.add(model, alone=True)
    scalers = [] if scaler is None else [scaler]
    watched = InspectedStep([model], optimizers, scalers, findings, names, guard, twin)
    with watched.watched():
        step()
    report: InspectReport = guard.run_always(watched.report, default=None)
    return report or InspectReport((), (), (), False, None, findings.report(has_step=True))
