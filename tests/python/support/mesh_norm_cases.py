# SPDX-License-Identifier: Apache-2.0
"""Clipping where ranks hold stages of a model, shards of their weights, and copies of the rest."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fastamp
import fastamp.optim

ORDERS = (2.0, 1.0, 3.0, float("inf"))
SCALE = 4.0
MAX_NORM = 0.5


def full_gradients(stages: int) -> list[dict[str, torch.Tensor]]:
    """Of each stage: a weight to be sharded over "tp", a bias that its ranks have copies of."""
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "weight": torch.randn(8, 3, generator=generator),
            "bias": torch.randn(5, generator=generator),
        }
        for _ in range(stages)
    ]


class Part:
    """What one rank has of the model: on four ranks, half of the weight of one of two stages."""

    def __init__(self) -> None:
        size = dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("pp", "tp"))
        stage, shard = self.mesh.get_coordinate() or [0, 0]
        self.full = full_gradients(size // 2)[stage]
        rows = self.full["weight"].chunk(2)[shard]
        self.weight = self.parameter(rows)
        self.bias = self.parameter(self.full["bias"])
        self.pp, self.tp = self.mesh["pp"], self.mesh["tp"]
        #: All gradients are of one stage only; weights are shards.
        self.shards: dict[Any, Any] = {self.pp: None, self.tp: [self.weight]}

    @staticmethod
    def parameter(gradient: torch.Tensor) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        return parameter

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [self.weight, self.bias]


def clipped(order: float) -> Any:
    part = Part()
    norm = fastamp.clip_grad_norm_(part.parameters, MAX_NORM, order, mesh=part.shards)
    return norm, [p.grad for p in part.parameters]


def stepped(make: Any, order: float, bad_rank: int | None = None) -> Any:
    """Through a scaler, which agrees on overflows over all ranks."""
    part = Part()
    optimizer = make(part.parameters, lr=1.0)
    scaler = fastamp.GradScaler("cpu", init_scale=SCALE, process_group=dist.group.WORLD)
    scaler.scale(torch.ones(()))
    for parameter in part.parameters:
        parameter.grad *= SCALE
    if dist.get_rank() == bad_rank:
        part.weight.grad[0, 0] = float("inf")
    norm = scaler.clip_grad_norm_(optimizer, MAX_NORM, order, mesh=part.shards)
    scaler.step(optimizer)
    scaler.update()
    weights = [-p.detach() for p in part.parameters]
    return norm, weights, scaler.step_was_skipped, scaler.history()[-1].norm


def disabled() -> Any:
    part = Part()
    scaler = fastamp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(part.parameters, lr=1.0)
    return scaler.clip_grad_norm_(optimizer, MAX_NORM, mesh=part.shards)


def all_sharded() -> Any:
    """Each rank has other rows of one weight; fp16 and float64, and a rank without gradients."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    whole = full_gradients(1)[0]["weight"]
    mine = whole.chunk(size)[rank]
    out = {}
    for dtype in (torch.float16, torch.float32, torch.float64):
        parameter = Part.parameter(mine.to(dtype))
        out[dtype] = fastamp.clip_grad_norm_(parameter, 1e9, mesh=mesh)
    empty = rank == size - 1
    parameters = [] if empty else [Part.parameter(mine)]
    out["without"] = fastamp.clip_grad_norm_(parameters, 1e9, mesh={dist.group.WORLD: None})
    return out


def dtensors() -> Any:
    """A DTensor's norm is over its own mesh; stages are summed up beside it."""
    part = Part()
    rows = part.weight.grad
    placed = [Shard(0)]
    weight = torch.nn.Parameter(DTensor.from_local(torch.zeros_like(rows), part.tp, placed))
    weight.grad = DTensor.from_local(rows, part.tp, placed)
    norm = fastamp.clip_grad_norm_([weight, part.bias], MAX_NORM, mesh=part.pp)
    return norm, [weight.grad.to_local(), part.bias.grad]


def refusals() -> dict[str, str]:
    part = Part()
    size, rank = dist.get_world_size(), dist.get_rank()
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2), part.tp, [Shard(0)]))
    weight.grad = DTensor.from_local(torch.ones(2), part.tp, [Shard(0)])
    outsiders = dist.new_group([0])
    first = DeviceMesh("cpu", [0])
    clip = functools.partial(fastamp.clip_grad_norm_, part.parameters, MAX_NORM)
    scaler = fastamp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(part.parameters, lr=1.0)
    calls: dict[str, Any] = {
        "type": lambda: clip(mesh="tp"),
        "group": lambda: clip(mesh=dist.group.WORLD),
        "key": lambda: clip(mesh={"tp": None}),
        "none": lambda: clip(mesh={None: None}),
        "values": lambda: clip(mesh={part.tp: ["weight"]}),
        "twice": lambda: clip(mesh={part.tp: None, part.tp.get_group(): [part.weight]}),
        "order": lambda: clip(norm_type=0.0, mesh=part.tp),
        "own mesh": lambda: fastamp.clip_grad_norm_([weight], 1.0, mesh=part.tp),
        "scaler": lambda: scaler.clip_grad_norm_(optimizer, 1.0, mesh=3),  # type: ignore[arg-type]
    }
    if rank == size - 1:
        calls["outsider"] = lambda: clip(mesh={outsiders: None})
        calls["outside mesh"] = lambda: clip(mesh=first)
    texts = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
    same = torch.equal(part.bias.grad, part.full["bias"])
    texts["unchanged"] = str(same and not scaler._per_optimizer_states)
    return texts


def run(_: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for order in ORDERS:
        out["clip", order] = clipped(order)
        out["torch", order] = stepped(torch.optim.SGD, order)
        out["fused", order] = stepped(fastamp.optim.SGD, order)
    for kind, make in (("torch", torch.optim.SGD), ("fused", fastamp.optim.SGD)):
        out["bad", kind] = stepped(make, 2.0, bad_rank=1)
        out["bad inf", kind] = stepped(make, float("inf"), bad_rank=0)
    out["disabled"] = disabled()
    out["all sharded"], out["dtensors"] = all_sharded(), dtensors()
    out["refusals"] = refusals()
    return out
