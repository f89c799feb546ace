"""The gradient scaler: torch.amp's and ours over the same optimizer."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.harness import BASELINE, OURS, Candidate, Goal, Result, Row, at_least_times
from benchmarks.rows.common import SCALERS, waiting_for

# So near 1 that gradients, which each call divides by it again, stay normal numbers.
SCALE = 1.0001


def make_optimizer(device: str, count: int, elements: int) -> torch.optim.SGD:
    """Returns an optimizer over ``count`` parameters that have gradients of ones."""
    parameters = [torch.zeros(elements, device=device, requires_grad=True) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(parameters, lr=1e-6)


def make_scaler(name: str, device: str) -> Any:
    """Returns a scaler that has a scale and never changes it."""
    scaler = SCALERS[name](device, init_scale=SCALE, growth_interval=2**30)
    scaler.scale(torch.ones((), device=device))
    return scaler


def _over_optimizer(device: str, statement: str, optimizer: torch.optim.Optimizer) -> Any:
    names = {"optimizer": optimizer}
    return {
        which: Candidate(statement, {**names, "scaler": make_scaler(which, device)})
        for which in SCALERS
    }


# The clear() makes the scaler take the optimizer for one that it has not seen in this iteration.
UNSCALE = "scaler._per_optimizer_states.clear(); scaler.unscale_(optimizer)"
STEP = "scaler.step(optimizer); scaler.update()"


def _small(device: str, verb: str, statement: str, count: int, goal: Goal | None) -> Row:
    def candidates() -> dict[str, Candidate]:
        optimizer = make_optimizer(device, count, 16)
        found: dict[str, Candidate] = _over_optimizer(device, statement, optimizer)
        return found

    name = f"{device}: {verb}, {count} x 16"
    return Row(name, candidates, wait=waiting_for(device), goal=goal)


def _large(device: str) -> Row:
    count, elements = 150, 600_000

    def candidates() -> dict[str, Candidate]:
        optimizer = make_optimizer(device, count, elements)
        gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
        multiply = Candidate(
            "for gradient in gradients: gradient.mul_(factor)",
            {"gradients": gradients, "factor": 1 / SCALE},
        )
        return {**_over_optimizer(device, UNSCALE, optimizer), "mul_": multiply}

    def near_mul(result: Result) -> bool:
        return result.median("mul_") >= 0.9 * result.median(OURS)

    return Row(
        f"{device}: unscale_, 150 x 600k fp32",
        candidates,
        bytes_moved=2 * 4 * count * elements,
        wait=waiting_for(device),
        goal=Goal("90 % of mul_'s bandwidth", near_mul),
    )


def _scale(device: str) -> Row:
    def candidates() -> dict[str, Candidate]:
        loss = torch.ones((), device=device, requires_grad=True)
        return {
            which: Candidate(
                "scaler.scale(loss)", {"scaler": make_scaler(which, device), "loss": loss}
            )
            for which in (BASELINE, OURS)
        }

    return Row(f"{device}: scale(loss)", candidates, wait=waiting_for(device))


def rows(device: str) -> list[Row]:
    """Returns the rows of one device."""
    goals = {1000: at_least_times(5), 10000: at_least_times(5)}
    unscale = [
        _small(device, "unscale_", UNSCALE, count, goals.get(count))
        for count in (10, 100, 1000, 10000)
    ]
    step = [
        _small(device, "step + update, SGD", STEP, count, None) for count in (10, 100, 1000, 10000)
    ]
    return [_scale(device), *unscale, _large(device), *step]
