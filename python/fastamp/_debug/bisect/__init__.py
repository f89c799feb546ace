# SPDX-License-Identifier: Apache-2.0
"""Finds the ops that have to run in fp32 for a step's gradients to agree with fp32's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

import fastamp._C as _C
from fastamp._debug.bisect.bisect_report import BisectReport, Fp32Op
from fastamp._debug.bisect.runs import Gradients, Place, Runs, agreement
from fastamp._debug.bisect.search import OutOfRuns, needed_of
from fastamp._debug.bisect.suspects import Suspect, Suspects
from fastamp._debug.check import checked_arguments
from fastamp._debug.watch.model_names import ModelNames
from fastamp._debug.watch.modules import is_half
from fastamp._debug.watch.op_calls import watched
from fastamp._policy.policy_file import DEVICES, is_listed
from fastamp._policy.table import register_op, unregister_op
from fastamp._util.tool_guard import ToolGuard

__all__ = ["BisectReport", "Fp32Op", "bisect"]

#: Runs that every bisection needs: fp32, fp32 again, the step as it is, all ops in fp32.
_FIRST_RUNS = 4


class _Unguarded(ToolGuard):
    """Lets faults through: a bisection is all that its step is run for, and needs each op."""

    def fail(self, error: Exception) -> None:
        raise error


def bisect(
    step: Callable[[], Any],
    model: torch.nn.Module,
    agree: float = 0.999,
    *,
    max_runs: int = 40,
) -> BisectReport:
    """Finds the cheapest ops and modules that have to run in fp32 for right gradients.

    ::

        def step():
            with fastamp.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(x), y)
            (loss * 2**10).backward()

        report = fastamp.debug.bisect(step, model)
        report.print()
        report.write("policy.toml")  # python -m fastamp --policy policy.toml train.py

    Gradients of the step are compared with those of the same step without autocast. Those are first
    compared with themselves, then with the step that has all its ops in fp32. The search runs the
    step with some ops in fp32: first those that are no products, because fp32 costs them little,
    and of these first the ones whose rounding errors grow the most until the loss. Then it looks
    for the modules in which these ops need it. A single op is found in about six runs.

    Parameters, buffers, gradients, random numbers and policies are afterwards what they were, also
    if something is raised. It keeps a copy of parameters and buffers and up to three sets of
    gradients; one run keeps all tensors of the step, in fp32 too. Compiled functions run eagerly.

    Args:
        step: A forward pass in an autocast region and its backward pass, of one batch, without the
            optimizer's step. Called with the same random numbers each time. A loss scale may be in
            it, always the same.
        model: Whose gradients count, with float32 parameters, on which ``step`` works.
        agree: What the agreement of gradients with fp32's is to be at least: above 0, below 1. See
            :class:`BisectReport`.
        max_runs: How often ``step`` may run, at least 5. If that is not enough, the best that was
            found is returned.

    Returns:
        The ops, agreement before and after, predicted cost; ``write`` makes a policy file.

    Raises:
        TypeError: An argument has another type.
        ValueError: An argument has another value; parameters have 16 bits; the step leaves no
            gradients, or calls an optimizer's step.
        RuntimeError: fp32 does not agree with itself, so that the step is not deterministic; its
            gradients are inf, NaN or all 0; or the gradients do not agree with all ops in fp32.
            The text says by how much. Or fastamp's kernels are not registered.

    Note:
        What ``step`` raises comes through. One thread is followed, and the backward passes that it
        starts. Do it while no other thread runs the model.
    """
    _check_arguments(step, model, agree, max_runs)
    runs = Runs(step, model, max_runs)
    with runs.open():
        reference, low = runs.in_fp32()
        noise = _noise_floor(runs, reference, agree)
        suspects = Suspects(_names(model))
        with watched([model], suspects, ModelNames(), _Unguarded("bisect")):
            gradients, time = runs.gradients_and_time()
        before = agreement(gradients, reference)
        ranked = suspects.ranked()
        if before >= agree:
            return BisectReport((), agree, before, before, noise, low, None, 0.0, runs.count, True)
        with _registered(ranked) as able:
            search = _Search(runs, reference, agree, able, time)
            all_fp32 = search.all_fp32(ranked)
            chosen, is_complete = search.chosen()
            after, cost = search.agreement_and_cost(chosen)
            return BisectReport(
                search.rows(chosen),
                agree,
                before,
                after,
                noise,
                low,
                all_fp32,
                cost,
                runs.count,
                is_complete,
            )


def _check_arguments(step: Any, model: Any, agree: Any, max_runs: Any) -> None:
    if not callable(step):
        raise TypeError(f"bisect: expected step to be callable, got {type(step).__name__}")
    checked_arguments("bisect", model, None, None, step)
    for name, value, kinds in (("agree", agree, (int, float)), ("max_runs", max_runs, (int,))):
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"bisect: expected {name} to be a number, got {type(value).__name__}")
    if not 0 < agree < 1:
        raise ValueError(f"bisect: expected agree above 0 and below 1, got {agree}")
    if max_runs <= _FIRST_RUNS:
        raise ValueError(f"bisect: expected max_runs of at least {_FIRST_RUNS + 1}, got {max_runs}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("bisect: expected model to have parameters with gradients, got none")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"bisect: expected parameters that have their sizes, got {name} of a lazy module: "
                "call the model once before"
            )
        if is_half(parameter):
            raise ValueError(
                f"bisect: expected float32 parameters, got {name} of {parameter.dtype}: without "
                "fp32 weights there is no fp32 to compare with; try model.float()"
            )


def _names(model: torch.nn.Module) -> dict[str, str]:
    """The name of each module by the one under which it is watched: the model has its class's."""
    return {type(model).__name__: ""} | {name: name for name, _ in model.named_modules() if name}


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    """Returns those that may not be 0; sparse tensors have no ops that ask."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _noise_floor(runs: Runs, reference: Gradients, agree: float) -> float:
    for name, gradient in reference.items():
        if not _numbers(gradient).isfinite().all():
            raise RuntimeError(
                f"bisect: expected finite gradients in fp32, got inf or NaN in that of {name}: the "
                "step is wrong without mixed precision, too"
            )
    if not any(_numbers(gradient).any() for gradient in reference.values()):
        raise RuntimeError("bisect: expected gradients in fp32 that are not all 0, got zeros only")
    noise = agreement(runs.in_fp32()[0], reference)
    if noise < agree:
        raise RuntimeError(
            f"bisect: expected a step that gives the same gradients each time, got two runs in "
            f"fp32 that agree to {noise:.6f} only, with the same parameters, buffers and random "
            f"numbers; agree={agree:g} cannot be seen through that. Give step one fixed batch, and "
            "put back what else it changes"
        )
    return noise


@contextlib.contextmanager
def _registered(ranked: list[Suspect]) -> Iterator[list[Suspect]]:
    """Registers ops that are in no list, for the block; yields those that can run in fp32."""
    registered: list[str] = []
    able = []
    try:
        for suspect in ranked:
            try:
                if "::" in suspect.op and not is_listed(suspect.op):
                    register_op(suspect.op, "pass")
                    registered.append(suspect.op)
                for device in DEVICES:
                    _C.checked_op_policies([(device, [(suspect.op, "fp32")])])
            except ValueError:
                continue  # It writes an argument, or takes no tensor that a policy could cast.
            able.append(suspect)
        yield able
    finally:
        for name in reversed(registered):
            unregister_op(name)


class _Search:
    """Tries sets of ops; remembers what their gradients agreed to, and forgets the gradients."""

    def __init__(
        self,
        runs: Runs,
        reference: Gradients,
        agree: float,
        suspects: list[Suspect],
        time: float,
    ) -> None:
        self._tried: dict[frozenset[Place], tuple[float, float]] = {}
        self._runs, self._reference, self._agree = runs, reference, agree
        self._time = time
        self._suspects = suspects
        self._of_op: dict[str, list[Suspect]] = {}
        for suspect in suspects:
            self._of_op.setdefault(suspect.op, []).append(suspect)

    def all_fp32(self, ranked: list[Suspect]) -> float:
        """Runs the step with all ops in fp32; raises if that is not enough."""
        everything = self._everywhere()
        holds = bool(everything) and self._holds(everything)
        agreed = self.agreement_and_cost(everything)[0] if everything else 0.0
        if holds:
            return agreed
        left = sorted({each.op for each in ranked} - set(self._of_op))
        raise RuntimeError(
            f"bisect: expected gradients that agree with fp32's to {self._agree:g} with all "
            f"{len(everything)} ops of the region in fp32, got {agreed:.6f}; "
            + (f"no policy brings {', '.join(left)} there; " if left else "")
            + "look for .half(), .bfloat16() and .to() in the model, for 16-bit inputs, and for "
            "policies.override in the step, which win over those that are tried"
        )

    def chosen(self) -> tuple[list[Place], bool]:
        """Returns the cheapest set that was found, and whether the search came to its end."""
        try:
            ops = self._needed(self._everywhere())
            places = self._places(ops)
            return places if self._suffice(places, ops) else ops, True
        except OutOfRuns:
            enough = {k: cost for k, (value, cost) in self._tried.items() if value >= self._agree}
            return sorted(min(enough, key=lambda tried: enough[frozenset(tried)]), key=str), False

    def agreement_and_cost(self, places: list[Place]) -> tuple[float, float]:
        """Describes a set that was tried; the cost is the share that the step becomes longer by."""
        return self._tried[frozenset(places)]

    def rows(self, places: list[Place]) -> tuple[Fp32Op, ...]:
        """Returns what is known of the ops of a set."""
        rows = []
        for place in places:
            found = self._at(place)
            errors = [each.local_error for each in found if each.local_error is not None]
            rows.append(
                Fp32Op(
                    *place,
                    modules=len(found),
                    calls=sum(each.calls for each in found),
                    local_error=max(errors, default=None),
                    cost=sum(each.time for each in found) / max(self._time, 1.0),
                )
            )
        return tuple(rows)

    def _everywhere(self) -> list[Place]:
        return [(op, None) for op in self._of_op]

    def _at(self, place: Place) -> list[Suspect]:
        op, module = place
        return [each for each in self._of_op[op] if module is None or each.module == module]

    def _needed(self, places: list[Place]) -> list[Place]:
        cheap = [p for p in places if not any(each.is_product for each in self._at(p))]
        ordered = cheap + [p for p in places if p not in cheap]
        return needed_of(ordered, self._holds, len(cheap))

    def _places(self, ops: list[Place]) -> list[Place]:
        """Returns where the model needs fp32; the ops themselves if in most of their places."""
        names = {op for op, _ in ops}
        places: list[Place] = [(e.op, e.module) for e in self._suspects if e.op in names]
        if any(module is None for _, module in places):
            return ops  # Outside of the model no module says where.
        if len(places) == len(ops):
            return places
        few = places[: max(len(places) // 2, len(ops))]
        return self._needed(few) if self._holds(few) else ops

    def _suffice(self, places: list[Place], ops: list[Place]) -> bool:
        return places == ops or self._holds(places)

    def _holds(self, places: list[Place]) -> bool:
        key = frozenset(places)
        if key not in self._tried:
            gradients, time = self._runs.under(places)
            agreed = agreement(gradients, self._reference)
            self._tried[key] = agreed, time / max(self._time, 1.0) - 1
        return self._tried[key][0] >= self._agree
