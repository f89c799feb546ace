# SPDX-License-Identifier: Apache-2.0
"""Buckets of known gradients, reduced by DDP with hooks of fastamp and torch, in each rank."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import fastamp
from fastamp.distributed import compress_hook, fp32_reduce_hook

BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = ((5,), (3, 4), (17,))
STEPS = 16
BAD_STEP = 10
SCALES = (1.0, 1e-9, 1e9)
INF, NAN = float("inf"), float("nan")
#: The same on all ranks; what their means in 16 bits do with a scale of 1.
EDGES = (60000.0, 2.0**-24, -(2.0**-24), 65504.0, 0.0)


class Given(nn.Module):
    """Its backward pass gives its weights the gradients that its forward pass was given."""

    def __init__(self, dtype: torch.dtype, shapes: Any = SHAPES) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        parts = [(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]
        return torch.stack(parts).sum()


def given(rank: int, kind: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Gradients of one rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    tensors = []
    for shape, scale in zip(SHAPES, SCALES, strict=True):
        if kind == "whole":  # Few bits, so float32 sums are exact.
            tensor = torch.randint(-2047, 2048, shape, generator=generator) / 64.0
        else:
            tensor = torch.randn(shape, generator=generator)
        if kind == "scaled":
            tensor *= scale
        if kind == "wide":
            tensor *= 10.0 ** torch.randint(-3, 4, shape, generator=generator)
        tensors.append(tensor.to(dtype))
    return tensors


def model_on_ddp(dtype: torch.dtype, hook: Any, state: Any = None, **options: Any) -> Any:
    """Each weight has a bucket of its own."""
    ddp = DistributedDataParallel(Given(dtype), bucket_cap_mb=1e-5, **options)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    return ddp


def reduced(ddp: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(gradients).backward()
    return [w.grad.clone() for w in ddp.module.weights]


def once(hook: Any, kind: str, dtype: torch.dtype, **options: Any) -> list[list[torch.Tensor]]:
    """The same gradients twice: buckets are made anew after the first step."""
    ddp = model_on_ddp(dtype, hook, **options)
    return [reduced(ddp, given(dist.get_rank(), kind, dtype)) for _ in range(2)]


def edges(hook: Any) -> torch.Tensor:
    ddp = model_on_ddp(FP16, hook)
    first = torch.tensor(EDGES, dtype=FP16)
    return reduced(ddp, [first, torch.zeros(3, 4).half(), torch.zeros(17).half()])[0]


def with_bad(gradients: list[torch.Tensor], last: bool) -> list[torch.Tensor]:
    changed = [gradient.clone() for gradient in gradients]
    if last:
        changed[0][1], changed[2][3] = INF, NAN
    return changed


def bad_values(hook: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    return reduced(model_on_ddp(dtype, hook), with_bad(given(rank, "whole", dtype), rank == last))


def added_up(ddps: list[Any], kind: str = "normal", bad: bool = False) -> list[Any]:
    """The float64 sums of what constant gradients are reduced to, of each model."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    own = given(rank, kind)
    sums = [[torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in ddps]
    for step in range(STEPS):
        for ddp, total in zip(ddps, sums, strict=True):
            is_bad = bad and step == BAD_STEP
            means = reduced(ddp, with_bad(own, is_bad and rank == last))
            if not is_bad:  # Such a step is skipped.
                for s, mean in zip(total, means, strict=True):
                    s += mean.double()
    return sums


def compressed(dtype: torch.dtype) -> dict[str, Any]:
    def fresh(hook: Any) -> Any:
        return model_on_ddp(torch.float32, hook)

    shared = compress_hook(dtype)
    # Each weight has a bucket of its own from the first step on: a bucket has one range.
    options = {"find_unused_parameters": True}
    scaled = model_on_ddp(torch.float32, compress_hook(dtype), **options)
    again = compress_hook(dtype)
    ddp = fresh(again)
    own = given(dist.get_rank(), "normal")
    first = reduced(ddp, own)
    second = reduced(ddp, own), reduced(ddp, own)
    again.reset()
    return {
        "with": added_up([fresh(shared) for _ in range(2 if dtype == BF16 else 1)]),
        "without": added_up([fresh(compress_hook(dtype, error_feedback=False))])[0],
        "bad": added_up([scaled], "scaled", bad=True)[0],
        "bad values": bad_values(compress_hook(dtype), torch.float32),
        "16-bit": once(compress_hook(dtype, error_feedback=False), "whole", dtype),
        "reset": (first, reduced(ddp, own), second[1]),
        "scaler": scaled_feedback(dtype),
    }


#: Of each step; None: the loss is not scaled.
LOSS_SCALES = (65536.0, 65536.0, 1.0, 0.375, None, 65536.0, 1.0, 1.0)


def break_off(scaler: fastamp.GradScaler) -> None:
    """A backward pass of a large scale that raises, as one that runs out of memory does."""

    def fail(_: torch.Tensor) -> None:
        raise MemoryError("in backward")

    scaler.update(65536.0)
    hidden = torch.zeros((), requires_grad=True) * 1.0
    hidden.register_hook(fail)
    with contextlib.suppress(MemoryError):
        scaler.scale(hidden).backward()


def scaled_feedback(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """What constant gradients are reduced to, unscaled, while the scale changes."""
    own = given(dist.get_rank(), "normal")
    ddp = model_on_ddp(torch.float32, compress_hook(dtype))
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    steps = []
    for scale in LOSS_SCALES:
        ddp.zero_grad()
        loss = ddp(own)
        if scale is not None:
            scaler.update(scale)
            loss = scaler.scale([loss])[0]
        else:
            break_off(scaler)
        loss.backward()
        steps.append([w.grad.double() / (scale or 1.0) for w in ddp.module.weights])
    return steps


def in_a_group_of_three() -> Any:
    """Where multiplying by 1/3 is not dividing by 3; None on the fourth rank."""
    if dist.get_world_size() < 4:
        return None
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return None
    options = {"process_group": group}
    return [
        (
            once(None, "normal", d, **options),
            once(fp32_reduce_hook, "normal", d, state=group, **options),
        )
        for d in (torch.float32, torch.float64)
    ]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 2, sparse=True)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.rows(index).sum()


def refusals() -> dict[str, str]:
    """What each hook says to what it does not take."""
    texts = {}
    for name, hook in (("fp32", fp32_reduce_hook), ("compress", compress_hook(BF16))):
        outsider = dist.new_group([0])
        ddp = DistributedDataParallel(Table())
        ddp.register_comm_hook(None, hook)
        for what, call in (
            ("bucket", lambda hook=hook: hook(None, torch.ones(3))),
            ("state", lambda hook=hook: hook(7, torch.ones(3))),
            ("group", lambda hook=hook, group=outsider: hook(group, torch.ones(3))),
            ("sparse", lambda ddp=ddp: ddp(torch.tensor([1, 2])).backward()),
        ):
            try:
                call()
            except Exception as error:
                texts[f"{name} {what}"] = f"{type(error).__name__}: {error}"
    return texts


def run(rank: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for dtype in (BF16, FP16):
        out["plain", dtype] = once(None, "wide", dtype)
        for kind, view in (("whole", False), ("whole", True), ("wide", True)):
            options = {"gradient_as_bucket_view": view}
            out["fp32", dtype, kind, view] = once(fp32_reduce_hook, kind, dtype, **options)
        out["bad", dtype] = bad_values(fp32_reduce_hook, dtype)
        out["compressed", dtype] = compressed(dtype)
    out["edges"], out["plain edges"] = edges(fp32_reduce_hook), edges(None)
    ddp = model_on_ddp(torch.float32, fp16_compress_hook)
    out["torch's fp16"] = reduced(ddp, given(rank, "scaled"))
    out["wider"] = [
        (once(None, "normal", d), once(fp32_reduce_hook, "normal", d))
        for d in (torch.float32, torch.float64)
    ]
    out["three"] = in_a_group_of_three()
    out["double"] = once(compress_hook(BF16), "normal", torch.float64)
    out["refusals"] = refusals()
    return out
