# SPDX-License-Identifier: Apache-2.0
"""Training steps on given gradients, for relations between two of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fastamp

# name, options: everything that acts on each element by itself.
OPTIMIZERS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (fastamp.optim.SGD, {"lr": 0.1}),
    (fastamp.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    (fastamp.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (fastamp.optim.Adam, {"lr": 0.01}),
    (fastamp.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    (fastamp.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (fastamp.optim.AdamW, {"lr": 0.01, "maximize": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
]
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


class Case:
    """Parameters, and gradients for some steps; the same ones for every run."""

    def __init__(self, seed: int, exact: bool = False) -> None:
        """Draws shapes, dtypes and values.

        Args:
            seed: Of all of it.
            exact: Gradients of small integers, whose squares have the same sum in any order.
        """
        draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.seed = seed
        self.optimizer, self.options = draw.choice(OPTIMIZERS)
        fused = issubclass(self.optimizer, fastamp.optim.SGD | fastamp.optim.Adam)
        count = draw.randint(1, 6)
        shapes = [
            draw.choice(((), (1,), (3,), (17,), (5, 7), (2, 3, 4), (1030,), (64, 33)))
            for _ in range(count)
        ]
        # torch's optimizers have no masters, and fp16 weights of theirs leave the range.
        dtypes = [draw.choice(DTYPES) if fused else torch.float32 for _ in range(count)]

        def some(shape: Sequence[int]) -> torch.Tensor:
            if exact:
                return torch.randint(-64, 65, tuple(shape), generator=generator).double()
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.values = [some(s).to(d) for s, d in zip(shapes, dtypes, strict=True)]
        self.steps = draw.randint(1, 4)
        self.gradients = [
            [some(v.shape).to(v.dtype) for v in self.values] for _ in range(self.steps)
        ]
        self.clip = draw.choice((None, 0.5, 1e3))
        self.overflow_at = draw.choice((None, None, 0, self.steps - 1))
        if self.overflow_at is not None:
            hit = draw.choice(self.gradients[self.overflow_at])
            hit.view(-1)[draw.randrange(hit.numel())] = draw.choice((float("inf"), float("nan")))
        self.draw = draw


Groups = list[dict[str, Any]]


def train(
    case: Case,
    scale: float = 1024.0,
    values: list[torch.Tensor] | None = None,
    gradients: list[list[torch.Tensor]] | None = None,
    groups: Callable[[list[torch.nn.Parameter]], Groups | list[Any]] = list,
    clip: bool = True,
    **scaler_options: Any,
) -> tuple[list[torch.Tensor], list[Any]]:
    """Trains with a scaler on gradients times its scale.

    Returns:
        The parameters, and what was reported: norms, scales, skips.
    """
    params = [torch.nn.Parameter(v.clone()) for v in (values or case.values)]
    optimizer = case.optimizer(groups(params), **case.options)
    options = {"init_scale": scale, "growth_interval": 1000, "backoff_factor": 0.5}
    scaler = fastamp.GradScaler("cpu", **(options | scaler_options))
    scaler.scale(torch.zeros(()))
    reported: list[Any] = []
    for of_step in gradients or case.gradients:
        factor = scaler.get_scale()
        for param, gradient in zip(params, of_step, strict=True):
            param.grad = gradient * factor
        if clip and case.clip is not None:
            reported.append(scaler.clip_grad_norm_(optimizer, case.clip))
        scaler.step(optimizer)
        skipped = scaler.step_was_skipped_for(optimizer)
        scaler.update()
        reported += [scaler.get_scale() / scale, skipped]
    return [p.detach() for p in params], reported
