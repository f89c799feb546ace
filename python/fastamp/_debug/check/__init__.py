# SPDX-License-Identifier: Apache-2.0
"""The linter for mixed precision."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import fastamp._C as _C
from fastamp._debug.check.cause import CauseRules
from fastamp._debug.check.model_rules import look_at_models
from fastamp._debug.check.op_rules import OpRules
from fastamp._debug.check.rules import RULES, CheckReport, Finding, Findings, Rule, checked_ignore
from fastamp._debug.check.step_rules import StepRules
from fastamp._debug.watch.calls import listening
from fastamp._debug.watch.model_names import ModelNames
from fastamp._debug.watch.modules import ModulePath
from fastamp._debug.watch.op_calls import OpCall, OpWatcher, watched, watched_thread
from fastamp._debug.watch.origins import Origins
from fastamp._util.tool_guard import ToolGuard

__all__ = ["RULES", "CheckReport", "Finding", "Rule", "check", "checked_arguments", "run_checked"]


def check(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    scaler: torch.amp.grad_scaler.GradScaler | None = None,
    *,
    step: Callable[[], Any] | None = None,
    ignore: Iterable[str] = (),
) -> CheckReport:
    """Looks for the mistakes that most often make mixed-precision training slow or wrong.

    ::

        print(fastamp.debug.check(model, optimizer, scaler, step=lambda: train_step(batch)))

    Rules about parameters, sizes and options need no step; the others look at one that runs, which
    takes many times as long as usual. ``python -m fastamp check train.py`` does this to a program
    as it is, and ``python -m fastamp check --list`` lists the rules; docs/debugging.md has an
    example of each.

    Args:
        model: What is trained.
        optimizer: Its optimizer, or several.
        scaler: Its gradient scaler, fastamp's or torch's; one that the step scales a loss with is
            found without. The rule on LR schedulers needs one of fastamp's.
        step: One training step, forward pass to ``optimizer.step()`` and ``scaler.update()``, as
            the program does it. It is called once, and trains.
        ignore: Names of rules that are not to be applied.

    Returns:
        What was found, which is false if nothing was; ``str`` of it says why and what to do.

    Raises:
        TypeError: An argument has another type.
        ValueError: ``ignore`` names no rule; the nearest are named.
        RuntimeError: fastamp's kernels are not registered, and there is a step.

    Note:
        What ``step`` raises comes through. One thread is watched, and backward passes on any; while
        a step is watched, compiled functions run eagerly. If the linter itself fails, a warning
        says so, and what was found until then is returned.
    """
    optimizers = checked_arguments("check", model, optimizer, scaler, step)
    findings = Findings(checked_ignore(ignore))
    guard, names = ToolGuard("fastamp.debug.check"), ModelNames()
    if step is not None:
        scalers = [] if scaler is None else [scaler]
        with run_checked([model], findings, scalers, optimizers, names, guard):
            step()
    guard.run(look_at_models, [model], optimizers, names, findings)
    return findings.report(has_step=step is not None)


def checked_arguments(
    function: str, model: Any, optimizer: Any, scaler: Any, step: Any
) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of a call; raises what :func:`check` says, in a function's name."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{function}: expected model to be a torch.nn.Module, got {type(model).__name__}"
        )
    optimizers = [] if optimizer is None else optimizer
    if isinstance(optimizers, torch.optim.Optimizer):
        optimizers = [optimizers]
    optimizers = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                f"{function}: expected optimizer to be a torch.optim.Optimizer or several, got "
                f"{type(each).__name__}"
            )
    if scaler is not None and not isinstance(scaler, torch.amp.grad_scaler.GradScaler):
        raise TypeError(
            f"{function}: expected scaler to be a GradScaler or None, got {type(scaler).__name__}"
        )
    if step is not None and not callable(step):
        raise TypeError(f"{function}: expected step to be callable, got {type(step).__name__}")
    if step is not None and not _C.kernels_registered():
        raise RuntimeError(
            f"{function}: expected fastamp's kernels to be registered, got FASTAMP_NO_REGISTER"
        )
    return optimizers


class _Rules(OpWatcher):
    def __init__(self, ops: OpRules, events: StepRules, origins: Origins) -> None:
        self._ops, self._events, self._origins = ops, events, origins

    def before(self, call: OpCall) -> None:
        self._events.see(call)
        self._ops.before(call)

    def after(self, call: OpCall, result: Any, noted: Any) -> None:  # noqa: ARG002
        self._ops.after(call, result)
        self._events.seen(call, result)
        self._origins.see(call, result)


@contextlib.contextmanager
def run_checked(
    models: Iterable[torch.nn.Module],
    findings: Findings,
    scalers: list[Any],
    optimizers: list[torch.optim.Optimizer],
    names: ModelNames,
    guard: ToolGuard,
) -> Iterator[Callable[[], ModulePath]]:
    """Applies the rules that need a step to what this thread runs inside the block.

    Args:
        models: Whose modules are named.
        findings: Where findings go.
        scalers: Gradient scalers of the program; the list may grow meanwhile.
        optimizers: Its optimizers; the same.
        names: Names modules.
        guard: Of the tool.

    Yields:
        Returns which module is running in the thread that calls it, to whose ops the rules are
        applied from then on, too.
    """
    ops = OpRules(findings)
    events = StepRules(findings, ops, scalers, optimizers, guard)
    origins = Origins(names)
    rules = _Rules(ops, events, origins)
    paths = threading.local()
    with (
        watched(models, rules, names, guard) as (path, recorder),
        contextlib.ExitStack() as others,
        events.followed(),
        listening(CauseRules(findings, origins, guard)),
    ):
        paths.here = path

        def path_here() -> ModulePath:
            if not hasattr(paths, "here"):
                paths.here = others.enter_context(watched_thread([], rules, names, guard))
            found: ModulePath = paths.here
            return found

        yield path_here
    guard.run(lambda: events.conclude(recorder.rows()))
