# SPDX-License-Identifier: Apache-2.0
"""Training under DDP with float32 weights, with 16-bit ones and fp32_main_grads, in each rank."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import fastamp
import fastamp.optim
from fastamp.distributed import compress_hook

BF16, FP16 = torch.bfloat16, torch.float16
STEPS, MICRO_BATCHES, BAD_STEP = 3, 3, 1


class Network(nn.Module):
    """Weights that are used once, twice, and in some passes only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.twice = nn.Linear(8, 8, bias=False)
        self.sometimes = nn.Conv2d(8, 8, 1).to(memory_format=torch.channels_last)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.norm(self.first(x)))))
        if branch:
            x = x + self.sometimes(x[:, :, None, None]).flatten(1)
        return self.last(x)


def ordered_mean(_, bucket):  # No annotations: DDP compares them with classes, not strings.
    """In the order of ranks: gloo's order depends on where in a bucket a gradient lies."""
    rows = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, bucket.buffer())
    future: Any = Future()
    future.set_result(torch.stack(rows).sum(0) / len(rows))
    return future


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


class Run:
    """One training run; `kind` says what the weights and their gradients are."""

    def __init__(
        self, kind: str, dtype: torch.dtype = BF16, model: nn.Module | None = None, **options: Any
    ) -> None:
        self.dtype, self.model = dtype, model or seeded(Network)
        if kind != "float32":
            grads = torch.float32 if kind == "float32 grads" else dtype
            example = (torch.ones(5, 4),)  # Shows that a weight is used twice.
            fastamp.optim.low_precision_weights_(
                self.model, dtype, grads=grads, example_inputs=example, verbose=False
            )
        self.ddp = DistributedDataParallel(self.model, **options)
        two = dist.get_world_size() == 2
        if kind in ("main grads", "float32 grads"):
            fastamp.distributed.fp32_main_grads(self.ddp, None if two else ordered_mean)
        elif not two:
            self.ddp.register_comm_hook(None, ordered_mean)
        self.optimizer = fastamp.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[float] = []

    def forward(self, step: int, part: int, branch: bool = True) -> torch.Tensor:
        seed = 100 * step + 10 * part + dist.get_rank()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        with torch.autocast("cpu", dtype=self.dtype):
            loss = self.ddp(x, branch).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def outcome(self) -> Any:
        masters = self.optimizer.masters()
        return self.losses, [masters[p].detach().clone() for p in self.model.parameters()]


def accumulated(kind: str, unused: bool = False, **options: Any) -> Any:
    """Micro-batches under no_sync; with `unused`, the last one leaves out a branch."""
    run = Run(kind, find_unused_parameters=unused, **options)
    dtypes = set()
    for step in range(STEPS):
        run.optimizer.zero_grad()
        for part in range(MICRO_BATCHES):
            last = part == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else run.ddp.no_sync():
                run.forward(step, part, branch=not (unused and last)).backward()
        dtypes |= {p.grad.dtype for p in run.model.parameters() if p.grad is not None}
        run.optimizer.step()
    return *run.outcome(), dtypes


def zeroed_late(kind: str) -> Any:
    """zero_grad between forward and backward, an evaluation, and a pass past DDP."""
    run = Run(kind)
    for step in range(STEPS):
        loss = run.forward(step, 0)
        with torch.no_grad():
            run.forward(step, 1)
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
    with torch.autocast("cpu", dtype=run.dtype):
        loss = run.model(torch.ones(2, 4)).float().square().mean()
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()
    return run.outcome()


def added_on(kind: str) -> Any:
    """Gradients of several synchronized passes, without zero_grad between them."""
    run = Run(kind)
    for step in range(STEPS):
        run.forward(step, 0).backward()
        run.forward(step, 1).backward()
        run.optimizer.step()
    return run.outcome()


def after_failures(kind: str, **options: Any) -> Any:
    """Synchronized forward passes that raise, before and between micro-batches under no_sync."""
    run = Run(kind, **options)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        for part in range(MICRO_BATCHES):
            with contextlib.suppress(RuntimeError):
                run.ddp(torch.ones(5, 3))  # of another width
            last = part == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else run.ddp.no_sync():
                run.forward(step, part).backward()
        run.optimizer.step()
    return run.outcome()


def called_twice(kind: str) -> Any:
    """Two forward passes, each in a region of its own, before one backward pass."""
    run = Run(kind)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        (run.forward(step, 0) + run.forward(step, 1)).backward()
        run.optimizer.step()
    return run.outcome()


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.two(x)


def in_two_passes(kind: str) -> Any:
    """Two losses of one forward pass, each with a backward pass of its own."""
    run = Run(kind, model=seeded(Halves))
    for _ in range(STEPS):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            outputs = run.ddp(torch.full((2, 4), 1.0 + dist.get_rank()))
        for output in outputs:
            output.float().square().mean().backward()
        run.optimizer.step()
    return run.outcome()


def static(kind: str) -> Any:
    run = Run(kind, static_graph=True)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.forward(step, 0).backward()
        run.optimizer.step()
    return run.outcome()


def scaled(kind: str) -> Any:
    """float16, clipped; in one step one rank overflows."""
    run = Run(kind, FP16)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    bad_rank = dist.get_world_size() - 1
    trace = []
    for step in range(STEPS):
        run.optimizer.zero_grad()
        loss = run.forward(step, 0)
        if step == BAD_STEP and dist.get_rank() == bad_rank:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        norm = scaler.clip_grad_norm_(run.optimizer, 0.1)
        scaler.step(run.optimizer)
        scaler.update()
        trace.append((str(norm.item()), scaler.step_was_skipped, scaler.get_scale()))
    return *run.outcome(), trace


def with_compression() -> Any:
    """The gradients of one step: float32 buckets that travel in bfloat16, and exact ones."""
    gradients = []
    for hook in (compress_hook(BF16), ordered_mean):
        model = seeded(Network).to(BF16)
        ddp = DistributedDataParallel(model)
        fastamp.distributed.fp32_main_grads(ddp, hook)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        ddp(x.to(BF16)).float().square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    return gradients


def refusals() -> dict[str, str]:
    def on_ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(model, **options)

    hooked = on_ddp(nn.Linear(2, 2).to(BF16))
    hooked.register_comm_hook(None, ordered_mean)
    used = on_ddp(nn.Linear(2, 2).to(BF16))
    used.module.weight.grad = torch.zeros(2, 2, dtype=BF16)
    calls: dict[str, Any] = {
        "no ddp": lambda: fastamp.distributed.fp32_main_grads(nn.Linear(2, 2)),  # type: ignore[arg-type]
        "views": lambda: fastamp.distributed.fp32_main_grads(
            on_ddp(nn.Linear(2, 2).to(BF16), gradient_as_bucket_view=True)
        ),
        "float32": lambda: fastamp.distributed.fp32_main_grads(on_ddp(nn.Linear(2, 2))),
        "hook": lambda: fastamp.distributed.fp32_main_grads(on_ddp(nn.Linear(2, 2).to(BF16)), 3),  # type: ignore[arg-type]
        "gradient": lambda: fastamp.distributed.fp32_main_grads(used),
        "hooked": lambda: fastamp.distributed.fp32_main_grads(hooked),
        "unused": lambda: Run("float32 grads", find_unused_parameters=True),
    }
    texts = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
    texts["unchanged"] = str({p.grad_dtype for p in hooked.parameters()})
    return texts


def run(_: int) -> dict[str, Any]:
    out: dict[str, Any] = {"refusals": refusals(), "compressed": with_compression()}
    for kind in ("float32", "main grads"):
        out["accumulated", kind] = accumulated(kind)
        out["small buckets", kind] = accumulated(kind, bucket_cap_mb=1e-4)
        out["unused", kind] = accumulated(kind, unused=True)
        out["zeroed late", kind] = zeroed_late(kind)
        out["added on", kind] = added_on(kind)
        out["after failures", kind] = after_failures(kind)
        out["unused after failures", kind] = after_failures(kind, find_unused_parameters=True)
        out["called twice", kind] = called_twice(kind)
        out["two passes", kind] = in_two_passes(kind)
        out["static", kind] = static(kind)
        out["scaled", kind] = scaled(kind)
    out["accumulated", "float32 grads"] = accumulated("float32 grads")
    out["accumulated", "16-bit grads"] = accumulated("16-bit grads")
    return out
