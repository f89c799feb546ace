# SPDX-License-Identifier: Apache-2.0
"""fp8 linear layers of other libraries, as candidates: those that are installed and run here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.harness import BASELINE, FASTAMP, Candidate
from benchmarks.sides import use_kernels_of

Step = Callable[[], Any]


def _transformer_engine(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> Step:
    engine: Any = importlib.import_module("transformer_engine.pytorch")
    recipes: Any = importlib.import_module("transformer_engine.common.recipe")
    outputs, inputs = weight.shape
    layer = engine.Linear(inputs, outputs, bias=False, params_dtype=torch.float32, device=x.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
    recipe = recipes.Float8CurrentScaling()

    def step() -> None:
        with (
            torch.autocast(x.device.type, dtype=torch.bfloat16),
            engine.fp8_autocast(enabled=True, fp8_recipe=recipe),
        ):
            y = layer(x)
        torch.autograd.grad(y, (x, layer.weight), grad)

    return step


def _torchao(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> Step:
    library: Any = importlib.import_module("torchao.float8")
    outputs, inputs = weight.shape
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device=x.device))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    library.convert_to_float8_training(model)

    def step() -> None:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = model(x)
        torch.autograd.grad(y, (x, model[0].weight), grad)

    return step


LIBRARIES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Step]] = {
    "Transformer Engine": _transformer_engine,
    "torchao": _torchao,
}


def peers(
    device: str, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor
) -> dict[str, Candidate]:
    """Returns forward and backward of a layer in each library's fp8, with current scaling, eager.

    A library that is not installed is left out; one that fails is, too, and says so.
    """
    found: dict[str, Candidate] = {}
    for name, make in LIBRARIES.items() if device == "cuda" else ():
        try:
            step = make(x, weight, grad)
            step()
        except ImportError:
            continue
        except Exception as error:  # the other candidates still count
            print(f"{name}: not measured: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        # Under torch's own autocast kernels, as their users have it.
        torchs, own = use_kernels_of(BASELINE), use_kernels_of(FASTAMP)
        found[name] = Candidate("step()", {"step": step}, torchs, own)
    return found
