# SPDX-License-Identifier: Apache-2.0
"""Unscale, clip, step and update with fastamp's optimizers, beside torch.amp with torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import fastamp
from benchmarks.goals import at_least_times, both, near_bandwidth_of
from benchmarks.harness import BASELINE, FASTAMP, Candidate, Goal, Row
from benchmarks.rows.scaler import LARGE, SCALE, make_gradients, make_scaler, weight_of
from benchmarks.sides import own_optimizers
from benchmarks.traffic import passes, total

GROUP = "Optimizer steps"
STEP = "scaler.step(optimizer); scaler.update()"
TORCH_CLIP = (
    "scaler.unscale_(optimizer); clip(parameters, 1.0); scaler.step(optimizer); scaler.update()"
)
OUR_CLIP = "scaler.clip_grad_norm_(optimizer, 1.0); scaler.step(optimizer); scaler.update()"
COUNTS = (1, 10, 100, 1000, 10_000)

Lists = Callable[[], list[torch.Tensor]]


def _candidate(
    which: str, device: str, parameters: list[torch.Tensor], make: Callable[..., Any], clip: bool
) -> Candidate:
    names = {"scaler": make_scaler(which, device), "optimizer": make(parameters)}
    if not clip:
        return Candidate(STEP, names)
    if which == FASTAMP:
        return Candidate(OUR_CLIP, names)
    more = {"clip": torch.nn.utils.clip_grad_norm_, "parameters": parameters}
    return Candidate(TORCH_CLIP, {**names, **more})


def _candidates(device: str, lists: Lists, kind: str, clip: bool) -> dict[str, Candidate]:
    """Returns fastamp, and torch.amp over torch's default optimizer and its foreach and fused ones.

    With clipping the baseline is torch's fused optimizer, the fastest it has.
    """
    if clip and not hasattr(fastamp.GradScaler, "clip_grad_norm_"):
        raise ImportError("this fastamp has no GradScaler.clip_grad_norm_")
    torchs = partial(getattr(torch.optim, kind), lr=1e-6)
    own = partial(getattr(own_optimizers(), kind), lr=1e-6)
    others = {"torch foreach": partial(torchs, foreach=True)}
    if clip:
        baseline = partial(torchs, fused=True)
    else:
        baseline, others["torch fused"] = torchs, partial(torchs, fused=True)
    found = {
        BASELINE: _candidate(BASELINE, device, lists(), baseline, clip),
        FASTAMP: _candidate(FASTAMP, device, lists(), own, clip),
    }
    for name, make in others.items():
        found[name] = _candidate(BASELINE, device, lists(), make, clip)
    return found


def _small(device: str, kind: str, clip: bool, count: int, goal: Goal | None) -> Row:
    verb = f"{'clip + ' if clip else ''}step + update, fastamp's {kind}"
    return Row(
        f"{device}: {verb}, {count} x 16",
        lambda: _candidates(device, lambda: make_gradients(device, count, 16), kind, clip),
        GROUP,
        device,
        goal=goal,
        curve=(f"{device}: {verb}, n x 16", count),
        weight=weight_of(count, 16, cheap=2000 if kind == "SGD" else 500),
    )


def _multiply(parameters: list[torch.Tensor]) -> Candidate:
    gradients = [parameter.grad for parameter in parameters]
    names = {"multiply": torch._foreach_mul_, "gradients": gradients, "factor": 1 / SCALE}
    return Candidate("multiply(gradients, factor)", names)


def _large(device: str, name: str, shapes: Callable[[], list[tuple[int, ...]]]) -> Row:
    sizes = [torch.Size(shape).numel() for shape in shapes()]

    def lists() -> list[torch.Tensor]:
        return [p for size in sizes for p in make_gradients(device, 1, size)]

    def candidates() -> dict[str, Candidate]:
        found = _candidates(device, lists, "AdamW", clip=True)
        del found["torch foreach"]  # a third of the memory, for a slower baseline
        return {**found, "foreach mul": _multiply(found[BASELINE].names["parameters"])}

    # The gradient is read twice and written once, parameter and two moments are read and written:
    # 36 bytes per fp32 parameter. torch.amp moves 48.
    done = passes(sum(sizes), "norm", "AdamW")
    bound = near_bandwidth_of("foreach mul", 0.9, 8 * sum(sizes))
    return Row(
        f"{device}: clip + step + update, fastamp's AdamW, {name}",
        candidates,
        GROUP,
        device,
        bytes_moved=total(done),
        passes=done,
        clock="events" if device == "cuda" else "host",
        goal=both(at_least_times(1.5), bound),
        weight=16,
    )


def _guarded(device: str, count: int, elements: int) -> Row:
    """A guarded step beside one without a guard; both clip, and both are fastamp's."""
    unguarded = "clip(parameters, 1.0); optimizer.step()"

    def candidates() -> dict[str, Candidate]:
        found = {}
        for name in (BASELINE, FASTAMP):
            parameters = make_gradients(device, count, elements)
            names: dict[str, Any] = {"optimizer": own_optimizers().AdamW(parameters, lr=1e-6)}
            names |= {"clip": fastamp.clip_grad_norm_, "parameters": parameters}
            statement = unguarded
            if name == FASTAMP:
                names["guard"] = fastamp.StepGuard(names["optimizer"])
                statement = "guard.clip_grad_norm_(1.0); optimizer.step()"
            found[name] = Candidate(statement, names)
        return found

    done = passes(count * elements, "norm", "AdamW")
    by_kernels = device == "cuda" and elements > 16
    return Row(
        f"{device}: clip + step, guarded and not, fastamp's AdamW, {count} x {elements}",
        candidates,
        GROUP,
        device,
        bytes_moved=total(done) if by_kernels else 0,
        passes=done if by_kernels else [],
        clock="events" if by_kernels else "host",
        goal=at_least_times(1 / 1.02),
        weight=weight_of(count, elements, cheap=1000),
    )


def transformer_shapes(blocks: int, width: int, tables: list[int]) -> list[tuple[int, ...]]:
    """Returns the shapes of the parameters of a GPT-2 or ViT, ``tables`` the rows of embeddings."""
    shapes: list[tuple[int, ...]] = [(rows, width) for rows in tables]
    for _ in range(blocks):
        for inputs, outputs in ((1, 3), (1, 1), (1, 4), (4, 1)):
            shapes += [(inputs * width, outputs * width), (outputs * width,)]
        shapes += [(width,)] * 4  # two norms
    return [*shapes, (width,), (width,)]


def rows(device: str) -> list[Row]:
    """Returns the rows of one device."""
    goals = {1000: at_least_times(3)} if device == "cpu" else {}
    found = [
        _small(device, kind, clip, count, goals.get(count) if kind == "SGD" else None)
        for kind, clip in (("SGD", False), ("AdamW", False), ("AdamW", True))
        for count in COUNTS
    ]
    lists = {"150 x 600k": lambda: [(LARGE[1],)] * LARGE[0]}
    if device == "cuda":
        lists["ViT-B"] = partial(transformer_shapes, 12, 768, [768, 197, 1000])
        lists["GPT-2"] = partial(transformer_shapes, 12, 768, [50257, 1024])
    found += [_guarded(device, *each) for each in ((10, 16), (10, 1000), (1000, 16), LARGE)]
    return found + [_large(device, name, shapes) for name, shapes in lists.items()]
