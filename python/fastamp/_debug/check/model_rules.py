# SPDX-License-Identifier: Apache-2.0
"""The rules that model and optimizer show without a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fastamp._debug.check.rules import Findings
from fastamp._debug.watch.model_names import ModelNames
from fastamp._debug.watch.origins import has_nonfinite
from fastamp.optim._fused import FusedOptimizer

_HALF = (torch.float16, torch.bfloat16)
_NORMS_WITH_STATISTICS = (nn.modules.batchnorm._NormBase,)
# Smaller products take microseconds whatever their sizes: the head of a classifier.
_LARGE_WEIGHT = 2**18
_SLOW_BETA2 = 0.99


def look_at_models(
    models: Iterable[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    names: ModelNames,
    findings: Findings,
) -> None:
    """The rules on models and their optimizers."""
    for model in models:
        names.add(model)
        _look_at_model(model, names, findings)
    for optimizer in optimizers:
        _look_at_optimizer(optimizer, names, findings)


def _look_at_model(model: nn.Module, names: ModelNames, findings: Findings) -> None:
    for module in model.modules():
        where = names.of_module(module)
        if isinstance(module, _NORMS_WITH_STATISTICS):
            statistics = module.running_var
            if statistics is not None and statistics.dtype in _HALF:
                kind = str(statistics.dtype).removeprefix("torch.")
                findings.add("norm-in-16-bits", where, f"running statistics in {kind}")
            for name in ("running_mean", "running_var"):
                if has_nonfinite(getattr(module, name)):
                    findings.add("norm-statistics-not-finite", where, name)
        for what, size in _sizes(module):
            if size % 8:
                findings.add("dims-not-multiple-of-8", where, f"{what}={size}")


def _sizes(module: nn.Module) -> Iterator[tuple[str, int]]:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or is_lazy(weight) or weight.numel() < _LARGE_WEIGHT:
        return
    if isinstance(module, nn.Linear):
        yield "in_features", module.in_features
        yield "out_features", module.out_features
    elif isinstance(module, nn.modules.conv._ConvNd) and module.groups == 1:
        # Summands of an output: three colors in patches of 16 x 16 are 768.
        yield "in_channels * kernel", weight[0].numel()
        yield "out_channels", module.out_channels


def _look_at_optimizer(
    optimizer: torch.optim.Optimizer, names: ModelNames, findings: Findings
) -> None:
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    # Optimizers of others may keep masters of their own.
    steps_in_half = not isinstance(optimizer, FusedOptimizer) and (
        getattr(type(optimizer).step, "__module__", "").startswith("torch.optim")
    )
    for number, group in enumerate(optimizer.param_groups):
        half = [p for p in group["params"] if p.requires_grad and p.dtype in _HALF]
        if half and steps_in_half:
            first = names.of_parameter(half[0]) or f"a parameter of shape {tuple(half[0].shape)}"
            findings.add(
                "half-weights-torch-optim",
                kind,
                f"{len(half)} of {len(group['params'])} parameters have 16 bits, such as {first}",
            )
        if steps_in_half:
            _look_at_eps(kind, number, group, half, findings)
        _look_at_moments(kind, number, optimizer, group, findings)


def _look_at_eps(
    kind: str, number: int, group: dict[str, Any], half: list[Any], findings: Findings
) -> None:
    eps = group.get("eps")
    if not isinstance(eps, float) or eps <= 0:
        return
    for dtype in sorted({p.dtype for p in half}, key=str):
        if torch.tensor(eps, dtype=dtype).item() == 0:
            name = str(dtype).removeprefix("torch.")
            findings.add("eps-is-zero", f"{kind} group {number}", f"eps={eps:g} is 0 in {name}")


def _look_at_moments(
    kind: str,
    number: int,
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    findings: Findings,
) -> None:
    betas = group.get("betas")
    if not isinstance(betas, (tuple, list)) or len(betas) < 2 or float(betas[1]) <= _SLOW_BETA2:
        return
    rounding = group.get("state_rounding", optimizer.defaults.get("state_rounding"))
    if rounding == "stochastic" or (rounding is None and isinstance(optimizer, FusedOptimizer)):
        return
    states = [optimizer.state.get(p, {}) for p in group["params"]]
    planned = group.get("state_dtype", optimizer.defaults.get("state_dtype"))
    if planned is torch.bfloat16 or any(
        isinstance(state.get("exp_avg_sq"), torch.Tensor)
        and state["exp_avg_sq"].dtype is torch.bfloat16
        for state in states
    ):
        findings.add(
            "bf16-second-moments",
            f"{kind} group {number}",
            f"exp_avg_sq in bfloat16 at beta2={float(betas[1]):g}",
        )
