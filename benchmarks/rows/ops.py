# SPDX-License-Identifier: Apache-2.0
"""Single ops inside an open region: torch's autocast kernels and fastamp's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import layer_norm, linear

import fastamp
from benchmarks.goals import at_least_times, not_slower
from benchmarks.harness import BASELINE, FASTAMP, Candidate, Goal, Row
from benchmarks.sides import inside_region

GROUP = "Ops in a region"


def _row(
    device: str, name: str, statement: str, make: Callable[[str], dict[str, Any]], goal: Goal
) -> Row:
    def candidates() -> dict[str, Candidate]:
        names = make(device)
        return {
            which: inside_region(which, device, torch.bfloat16, statement, names)
            for which in (BASELINE, FASTAMP)
        }

    return Row(f"{device}: {name}", candidates, GROUP, device, goal=goal)


def _matrices(size: int, x: torch.dtype, w: torch.dtype, grad: bool) -> Callable[[str], Any]:
    def make(device: str) -> dict[str, Any]:
        return {
            "mm": torch.mm,
            "x": torch.randn(size, size, device=device, dtype=x),
            "w": torch.randn(size, size, device=device, dtype=w).requires_grad_(grad),
        }

    return make


def _layers(device: str) -> dict[str, Any]:
    x = torch.randn(64, 64, device=device)
    return {
        "linear": linear,
        "layer_norm": layer_norm,
        "cat": torch.cat,
        "relu": torch.relu,
        "x": x,
        "half": x.bfloat16(),
        "mixed": [x, x.bfloat16()],
        "w": torch.randn(64, 64, device=device, requires_grad=True),
        "b": torch.randn(64, device=device, requires_grad=True),
    }


def _unified(device: str, name: str, torchs: str, own: str) -> Row:
    """A row of fastamp's kernels under "unify" beside torch's, which get casts by hand."""

    def candidates() -> dict[str, Candidate]:
        x = torch.randn(64, 64, device=device)
        names = {"lerp": torch.lerp, "x": x, "half": x.bfloat16(), "bf16": torch.bfloat16}
        found = {
            which: inside_region(which, device, torch.bfloat16, statement, names)
            for which, statement in ((BASELINE, torchs), (FASTAMP, own))
        }
        own_alone = found[FASTAMP]

        def under_unify() -> None:
            fastamp.policies.set("*", "unify", device)
            own_alone.before()

        def without() -> None:
            own_alone.after()
            fastamp.policies.set("*", "pass", device)

        found[FASTAMP] = replace(own_alone, before=under_unify, after=without)
        return found

    return Row(f"{device}: {name}", candidates, GROUP, device)


def rows(device: str) -> list[Row]:
    """Returns the rows of one device."""
    bf16, fp32 = torch.bfloat16, torch.float32
    products = [
        ("mm 8x8, bf16 (no cast)", 8, bf16, bf16, False),
        ("mm 128x128, bf16 (no cast)", 128, bf16, bf16, False),
        ("mm 8x8, bf16 x cached weight", 8, bf16, fp32, True),
        ("mm 8x8, fp32 x cached weight", 8, fp32, fp32, True),
        ("mm 8x8, fp32 x frozen fp32", 8, fp32, fp32, False),
        ("mm 128x128, fp32 x cached weight", 128, fp32, fp32, True),
    ]
    layers = [
        ("linear 64x64, fp32", "linear(x, w, b)"),
        ("x @ w.t() 64x64, fp32", "x @ w.t()"),
        ("layer_norm 64x64, bf16 to fp32", "layer_norm(half, (64,), b, b)"),
        ("cat fp32 + bf16 (promote)", "cat(mixed)"),
        ("relu bf16 (not in the table)", "relu(half)"),
    ]
    # On a GPU the host's part of an op is smaller: the goals for a CPU do not apply.
    cpu = device == "cpu"
    goals = {
        "mm 8x8, fp32 x cached weight": at_least_times(1.4) if cpu else not_slower(),
        "mm 8x8, fp32 x frozen fp32": at_least_times(1.7) if cpu else not_slower(),
    }
    unified = [
        ("unify: lerp of fp32 and bf16, by hand in torch", "lerp(x.to(bf16), half, 0.5)"),
        ("unify: lerp 64x64, bf16, which torch accepts", "lerp(half, half, 0.5)"),
        ("unify: fp32 + bf16, which torch accepts", "x + half"),
    ]
    return [
        _row(
            device,
            name,
            "mm(x, w)",
            _matrices(size, x, w, grad),
            goals.get(name, not_slower()),
        )
        for name, size, x, w, grad in products
    ] + [
        *(_row(device, name, statement, _layers, not_slower()) for name, statement in layers),
        *(
            _unified(device, name, statement, statement.replace("x.to(bf16)", "x"))
            for name, statement in unified
        ),
    ]
