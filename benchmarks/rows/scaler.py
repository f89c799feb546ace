# SPDX-License-Identifier: Apache-2.0
"""The gradient scaler: torch.amp's and fastamp's over the same optimizer of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fastamp
from benchmarks.goals import at_least_times, at_most, both, near_bandwidth_of
from benchmarks.harness import BASELINE, FASTAMP, Candidate, Goal, Row
from benchmarks.sides import REGIONS, SCALERS, use_kernels_of
from benchmarks.traffic import passes, total

GROUP = "Scaler"
# So close to 1 that gradients stay normal numbers, though each call divides by it again.
SCALE = 1.0001
COUNTS = (1, 10, 100, 1000, 10_000, 100_000)
LARGE = (150, 600_000)
UNLOGGED = "fastamp, not logged"
# Elements in all, for curves of cost against bytes: 64 KiB to 1 GiB of fp32.
SIZES = tuple(2**exponent for exponent in range(14, 29, 2))


def size(count: int) -> str:
    """Returns a number of bytes with its unit."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if count >= 2**power:
            return f"{count / 2**power:g} {unit}"
    return f"{count / 2**10:g} KiB"


def weight_of(count: int, elements: int, cheap: int = 20_000) -> float:
    """Returns the weight of a row: roughly the seconds for 31 repeats on two cores.

    Args:
        count: Tensors.
        elements: Elements of each, fp32.
        cheap: How many tensors a second is enough for.
    """
    return 1 + count / cheap + 4 * count * elements / 2**27


def make_gradients(device: str, count: int, elements: int) -> list[torch.Tensor]:
    """Returns parameters that have gradients of ones, each an allocation of its own."""
    parameters = [torch.zeros(elements, device=device, requires_grad=True) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def make_scaler(name: str, device: str) -> Any:
    """Returns a scaler that has a scale and never changes it."""
    scaler = SCALERS[name](device, init_scale=SCALE, growth_interval=2**30)
    scaler.scale(torch.ones((), device=device))
    return scaler


# The clear() makes the scaler take the optimizer for one that it has not seen in this iteration.
UNSCALE = "scaler._per_optimizer_states.clear(); scaler.unscale_(optimizer)"
ITERATION = "scaler.unscale_(optimizer); scaler.update()"
STEP = "scaler.step(optimizer); scaler.update()"


def over_optimizer(device: str, statement: str, count: int, elements: int) -> dict[str, Candidate]:
    """Returns both scalers over one SGD of torch's."""
    optimizer = torch.optim.SGD(make_gradients(device, count, elements), lr=1e-6)
    return {
        which: Candidate(statement, {"optimizer": optimizer, "scaler": make_scaler(which, device)})
        for which in SCALERS
    }


def _by_count(
    device: str, verb: str, statement: str, goals: dict[int, Goal], counts: tuple[int, ...]
) -> list[Row]:
    def candidates(count: int) -> Callable[[], dict[str, Candidate]]:
        return lambda: over_optimizer(device, statement, count, 16)

    return [
        Row(
            f"{device}: {verb}, {count} x 16",
            candidates(count),
            GROUP,
            device,
            goal=goals.get(count),
            curve=(f"{device}: {verb}, n x 16", count),
            weight=weight_of(count, 16),
        )
        for count in counts
    ]


def _with_multiply(device: str, count: int, elements: int) -> dict[str, Candidate]:
    found = over_optimizer(device, UNSCALE, count, elements)
    gradients = [p.grad for p in found[FASTAMP].names["optimizer"].param_groups[0]["params"]]
    names = {"multiply": torch._foreach_mul_, "gradients": gradients, "factor": 1 / SCALE}
    return {**found, "foreach mul": Candidate("multiply(gradients, factor)", names)}


def _by_bytes(device: str) -> list[Row]:
    def candidates(elements: int) -> Callable[[], dict[str, Candidate]]:
        # 16 tensors, as large layers come; with one the small sizes would measure nothing else.
        return lambda: _with_multiply(device, 16, elements // 16)

    # unscale_ sums the squares in its pass.
    return [
        Row(
            f"{device}: unscale_, {size(4 * elements)} in 16 tensors",
            candidates(elements),
            GROUP,
            device,
            bytes_moved=total(passes(elements, "unscale with norm")),
            passes=passes(elements, "unscale with norm"),
            clock="events" if device == "cuda" else "host",
            curve=(f"{device}: unscale_, bytes", 4 * elements),
            weight=weight_of(16, elements // 16),
        )
        for elements in SIZES
    ]


def _large(device: str) -> Row:
    count, elements = LARGE
    done = passes(count * elements, "unscale with norm")
    return Row(
        f"{device}: unscale_, 150 x 600k fp32",
        lambda: _with_multiply(device, count, elements),
        GROUP,
        device,
        bytes_moved=total(done),
        passes=done,
        clock="events" if device == "cuda" else "host",
        goal=near_bandwidth_of("foreach mul", 0.9, 8 * count * elements),
        weight=weight_of(count, elements),
    )


def first_passes(which: str, device: str, optimizer: torch.optim.Optimizer) -> None:
    """Makes a scaler and runs its first ten passes: in some of them fastamp's counts zeros, too."""
    scaler = make_scaler(which, device)
    for _ in range(10):
        scaler.unscale_(optimizer)
        scaler.update()


def _first_ten(device: str, count: int, elements: int) -> Row:
    def candidates() -> dict[str, Candidate]:
        optimizer = torch.optim.SGD(make_gradients(device, count, elements), lr=1e-6)
        names = {"first_passes": first_passes, "device": device, "optimizer": optimizer}
        return {
            which: Candidate("first_passes(which, device, optimizer)", {**names, "which": which})
            for which in SCALERS
        }

    return Row(
        f"{device}: first ten passes of unscale_, {count} x {elements // 1000}k fp32",
        candidates,
        GROUP,
        device,
        goal=at_least_times(1) if device == "cpu" else None,
        weight=10 * weight_of(count, elements),
    )


def _norms(device: str) -> list[Row]:
    """The op that finds norm and non-finite values in one pass, beside torch's two passes."""
    total_norm = torch.nn.utils.get_total_norm

    def candidates(count: int, elements: int) -> Callable[[], dict[str, Candidate]]:
        def make() -> dict[str, Candidate]:
            gradients = [p.grad for p in make_gradients(device, count, elements)]
            one = torch.ones(1, device=device)
            torch_names = {"norm": total_norm, "g": gradients}
            own = {
                "check": torch.ops.fastamp.norm_and_check_,
                "g": gradients,
                "one": one,
                "found": torch.zeros(1, device=device),
                "sum": torch.zeros(1, device=device, dtype=torch.float64),
            }
            return {
                BASELINE: Candidate("norm(g).isfinite()", torch_names),
                FASTAMP: Candidate("check(g, one, found, sum)", own),
            }

        return make

    return [
        Row(
            f"{device}: norm and check, {name}",
            candidates(count, elements),
            GROUP,
            device,
            bytes_moved=total(passes(count * elements, "norm")) if elements > 16 else 0,
            passes=passes(count * elements, "norm") if elements > 16 else [],
            clock="events" if device == "cuda" and elements > 16 else "host",
            weight=weight_of(count, elements),
        )
        for name, count, elements in (("1000 x 16", 1000, 16), ("150 x 600k", *LARGE))
    ]


def _scale(device: str) -> Row:
    def candidates() -> dict[str, Candidate]:
        loss = torch.ones((), device=device, requires_grad=True)
        return {
            which: Candidate(
                "scaler.scale(loss)", {"scaler": make_scaler(which, device), "loss": loss}
            )
            for which in (BASELINE, FASTAMP)
        }

    return Row(f"{device}: scale(loss)", candidates, GROUP, device)


def _unscale_goals() -> dict[int, Goal]:
    """3 us and 30 ns for each tensor; 100 ns where tensors no longer fit into a cache."""
    goals = {count: at_most(3000 + (100 if count > 50_000 else 30) * count) for count in COUNTS}
    for count in (1000, 10_000):
        goals[count] = both(at_least_times(15), goals[count])
    return goals


def _train(which: str, device: str) -> Callable[[], None]:
    """Returns a training step: four layers in a region, backward, scaler."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = make_scaler(which, device)
    region = REGIONS[which](device, dtype=torch.bfloat16)
    x = torch.randn(32, 64, device=device)

    def train() -> None:
        optimizer.zero_grad()
        with region:
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    train.__dict__["scaler"] = scaler
    return train


def _logged(device: str) -> Row:
    """Measures what log_to costs: the smallest step that there is reason to log."""

    def candidates() -> dict[str, Candidate]:
        # Of its own, which is not logged: counts of casts are the process's, and end with the log.
        found = {
            name: Candidate(
                "train()",
                {"train": _train(which, device)},
                use_kernels_of(which),
                use_kernels_of(FASTAMP),
            )
            for name, which in ((BASELINE, BASELINE), (UNLOGGED, FASTAMP))
        }
        train = _train(FASTAMP, device)
        logs: list[Any] = []

        def begin() -> None:
            use_kernels_of(FASTAMP)()
            logs.append(fastamp.debug.log_to(lambda *_: None, vars(train)["scaler"]))

        found[FASTAMP] = Candidate("train()", {"train": train}, begin, lambda: logs.pop().release())
        return found

    return Row(f"{device}: a step of four layers, log_to", candidates, GROUP, device)


def rows(device: str) -> list[Row]:
    """Returns the rows of one device."""
    goals = _unscale_goals() if device == "cpu" else {}
    return [
        _scale(device),
        *_by_count(device, "unscale_", UNSCALE, goals, COUNTS),
        *_by_bytes(device),
        _large(device),
        _first_ten(device, *LARGE),
        _first_ten(device, 100, 20_000),
        *_norms(device),
        *_by_count(device, "unscale_ + update", ITERATION, {}, (10, 1000)),
        *_by_count(device, "step + update, torch's SGD", STEP, {}, (10, 100, 1000, 10_000)),
        _logged(device),
    ]
