# SPDX-License-Identifier: Apache-2.0
"""What programs opt in to, beside what does the same by hand with torch.amp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fastamp
from benchmarks.goals import not_slower
from benchmarks.harness import BASELINE, FASTAMP, Candidate, Row
from benchmarks.rows.scaler import make_gradients, make_scaler, weight_of
from benchmarks.sides import inside_region, own_optimizers

GROUP = "Opt-in features"
LOW = torch.bfloat16


def _two_passes(device: str, count: int, elements: int) -> dict[str, Candidate]:
    """An iteration of SAM without its model: two passes over the same gradients."""
    found = {}
    for which in (BASELINE, FASTAMP):
        parameters = make_gradients(device, count, elements)
        optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
        if which == FASTAMP:
            own_optimizers().fuse_(optimizer)
        scaler, loss = make_scaler(which, device), torch.ones((), device=device)

        @torch.no_grad()
        def move_and_back(
            gradients: list[torch.Tensor], parameters: list[torch.Tensor] = parameters
        ) -> None:
            before = [p.clone() for p in parameters]
            torch._foreach_add_(parameters, gradients, alpha=1e-6)
            torch._foreach_copy_(parameters, before)

        def first(
            own: bool = which == FASTAMP,
            scaler: Any = scaler,
            loss: torch.Tensor = loss,
            optimizer: Any = optimizer,
            parameters: Any = parameters,
            move: Callable[[list[torch.Tensor]], None] = move_and_back,
        ) -> None:
            if own:
                with scaler.pass_(optimizer):
                    scaler.scale(loss)
                move([p.grad for p in parameters])
            else:
                scaler.scale(loss)
                move([p.grad / scaler.get_scale() for p in parameters])

        names = {"first": first, "scaler": scaler, "loss": loss, "optimizer": optimizer}
        statement = "first(); scaler.scale(loss); scaler.step(optimizer); scaler.update()"
        found[which] = Candidate(statement, names)
    return found


def _fp16_weights(device: str, count: int, elements: int) -> dict[str, Candidate]:
    """Unscales, clips and steps: fp32 weights with torch.amp, fp16 ones with masters."""
    found = {}
    for which in (BASELINE, FASTAMP):
        parameters = make_gradients(device, count, elements)
        gradients: list[torch.Tensor] = []
        if which == FASTAMP:
            parameters = [p.detach().half().requires_grad_() for p in parameters]
            gradients = [torch.ones_like(p) for p in parameters]
        optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
        if which == FASTAMP:
            own_optimizers().fuse_(optimizer, widen_grads=True)

        def begin(parameters: Any = parameters, gradients: Any = gradients) -> None:
            for parameter, gradient in zip(parameters, gradients, strict=False):
                parameter.grad = gradient  # As backward does: unscale_ has replaced it.

        names = {
            "begin": begin,
            "parameters": parameters,
            "optimizer": optimizer,
            "scaler": make_scaler(which, device),
            "clip": torch.nn.utils.clip_grad_norm_,
        }
        statement = (
            "begin(); scaler.unscale_(optimizer); clip(parameters, 1.0); scaler.step(optimizer); "
            "scaler.update()"
        )
        found[which] = Candidate(statement, names)
    return found


def _statistics(device: str, norms: int) -> dict[str, Candidate]:
    """Running statistics of batch norms that a skipped step must not change."""
    found = {}
    for which in (BASELINE, FASTAMP):
        layers = [torch.nn.BatchNorm1d(64) for _ in range(norms)]
        model = torch.nn.Sequential(*layers).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        scaler, loss = make_scaler(which, device), torch.ones((), device=device)
        buffers = list(model.buffers())

        def keep(
            scaler: Any = scaler, buffers: list[torch.Tensor] = buffers
        ) -> tuple[list[torch.Tensor], float]:
            return [buffer.clone() for buffer in buffers], scaler.get_scale()

        def put_back(
            kept: tuple[list[torch.Tensor], float],
            scaler: Any = scaler,
            buffers: list[torch.Tensor] = buffers,
        ) -> None:
            if scaler.get_scale() < kept[1]:
                torch._foreach_copy_(buffers, kept[0])

        names: dict[str, Any] = {"scaler": scaler, "loss": loss, "optimizer": optimizer}
        names |= {"model": model, "x": torch.randn(16, 64, device=device)}
        names |= {"keep": keep, "put_back": put_back}
        statement = "model(x); scaler.scale(loss); scaler.step(optimizer); scaler.update()"
        if which == FASTAMP:
            scaler.restore_on_skip(model)
        else:
            statement = f"kept = keep(); {statement}; put_back(kept)"
        found[which] = Candidate(statement, names)
    return found


class _Rotary(torch.nn.Module):
    def __init__(self, by_hand: bool, device: str) -> None:
        super().__init__()
        self.by_hand, self.device = by_hand, device
        self.register_buffer("inv_freq", 1e4 ** (-torch.arange(0, 64, 2, device=device) / 64))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.by_hand:
            return self.table(positions)
        with torch.autocast(self.device, enabled=False):
            return self.table(positions)

    def table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None] @ self.inv_freq[None]  # type: ignore[index]
        return angles.cos(), angles.sin()


def _positions(device: str, length: int) -> dict[str, Candidate]:
    found = {}
    for which in (BASELINE, FASTAMP):
        rotary = _Rotary(which == BASELINE, device)
        if which == FASTAMP:
            fastamp.policies.for_modules(rotary, {"": "positions"})
        names = {"rotary": rotary, "positions": torch.arange(length, device=device).float()}
        found[which] = inside_region(which, device, LOW, "rotary(positions)", names)
    return found


def _sparse(device: str, size: int) -> dict[str, Candidate]:
    sparse = torch.eye(size, device=device).to_sparse()
    dense = torch.randn(size, 64, device=device, dtype=LOW)
    found = {}
    by_hand = {"region": torch.autocast(device, enabled=False), "a": sparse, "x": dense}
    statement = "with region: y = a @ x.float()"
    found[BASELINE] = inside_region(BASELINE, device, LOW, statement, by_hand)
    presets: list[fastamp.policies.Preset] = []

    def begin() -> None:
        presets.append(fastamp.policies.preset("supported"))
        region.__enter__()

    def end() -> None:
        region.__exit__(None, None, None)
        presets.pop().release()

    region = fastamp.autocast(device, dtype=LOW)
    found[FASTAMP] = Candidate("y = a @ x", {"a": sparse, "x": dense}, begin, end)
    return found


def rows(device: str) -> list[Row]:
    """Returns the rows of one device."""
    found = [
        Row(
            f"{device}: two passes and a step, AdamW, {count} x {elements}",
            lambda count=count, elements=elements: _two_passes(device, count, elements),
            GROUP,
            device,
            goal=not_slower(),
            weight=weight_of(count, elements, cheap=500),
        )
        for count, elements in ((10, 1000), (100, 100_000))
    ]
    found += [
        Row(
            f"{device}: unscale_ + clip + step, fp16 weights with masters beside fp32 ones, "
            f"{count} x {elements}",
            lambda count=count, elements=elements: _fp16_weights(device, count, elements),
            GROUP,
            device,
            weight=weight_of(count, elements, cheap=500),
        )
        for count, elements in ((100, 1000), (100, 100_000))
    ]
    return [
        *found,
        Row(
            f"{device}: forward pass of 20 batch norms and a step that keeps their statistics",
            lambda: _statistics(device, 20),
            GROUP,
            device,
        ),
        Row(
            f"{device}: rotary table of 128 positions in a region, in float32",
            lambda: _positions(device, 128),
            GROUP,
            device,
        ),
        Row(
            f"{device}: sparse 64 x 64 @ 64 x 64 in a region, in float32",
            lambda: _sparse(device, 64),
            GROUP,
            device,
        ),
    ]
