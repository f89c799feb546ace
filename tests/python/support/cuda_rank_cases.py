# SPDX-License-Identifier: Apache-2.0
"""What two ranks do over NCCL, each with a CUDA device of its own (tests/python/distributed)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastamp
import fastamp.optim
from support.simulated_cuda import counted, is_simulated

STEPS = 6
BAD_STEP = 2


def made_model(device: torch.device) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model.to(device)


def data_of(rank: int, step: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 8, generator=generator).to(device)


def numbers_of(model: Any) -> list[torch.Tensor]:
    parameters = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [parameter.detach().cpu() for parameter in parameters]


def trained(model: Any, optimizer: Any, scaler: Any, region: Any, device: torch.device) -> Any:
    """Losses, scales and weights; in one step a gradient of the last rank alone is inf."""
    told = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with region:
            loss = model(data_of(dist.get_rank(), step, device)).float().square().mean()
        if step == BAD_STEP and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        told.append((loss.item(), scaler.get_scale()))
    return told, numbers_of(model)


def ddp(device: torch.device) -> dict[str, Any]:
    """The same job by torch.amp, by fastamp, and by fastamp's fused step."""

    def run(scaler: Any, autocast: Any, optimizer: Any) -> Any:
        model = DistributedDataParallel(made_model(device), device_ids=[device.index])
        region = autocast("cuda", dtype=torch.float16)
        return trained(model, optimizer(model.parameters(), lr=0.1), scaler, region, device)

    return {
        "torch": run(torch.amp.GradScaler("cuda"), torch.autocast, torch.optim.SGD),
        "fastamp": run(fastamp.GradScaler("cuda"), fastamp.autocast, torch.optim.SGD),
        "fused": run(fastamp.GradScaler("cuda"), fastamp.autocast, fastamp.optim.SGD),
    }


def agreed(device: torch.device) -> Any:
    """Ranks that share no gradients agree on an overflow of one, and say whose it was."""
    world = dist.group.WORLD
    model = made_model(device)
    optimizer = fastamp.optim.SGD(model.parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cuda", process_group=world)
    told, weights = trained(model, optimizer, scaler, fastamp.autocast("cuda"), device)
    report = scaler.overflow_report(model, group=world)
    return told, weights, [(each.rank, each.name) for each in report.gradients]


def collectives_of(step: Callable[[], object]) -> int | None:
    """How many calls of NCCL a step makes; None where nobody counts."""
    if not is_simulated():
        step()
        return None
    with counted("collectives") as counts:
        step()
    return counts["collectives"]


def sharded(device: torch.device) -> Any:
    """A clipped step of a whole model, and of one of which each rank has a part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole = made_model(device)
    parts = copy.deepcopy(whole)
    fully_shard(parts, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    told = []
    for model in (whole, parts):
        optimizer = fastamp.optim.SGD(model.parameters(), lr=0.1)
        scaler = fastamp.GradScaler("cuda", init_scale=8.0)
        with fastamp.autocast("cuda", dtype=torch.bfloat16):
            loss = model(data_of(0, 0, device)).float().square().mean()
        scaler.scale(loss).backward()
        norm: Any = scaler.clip_grad_norm_(optimizer, 0.5)
        count = collectives_of(lambda o=optimizer, s=scaler: s.step(o))  # type: ignore[misc]
        scaler.update()
        told.append((float(norm), count, numbers_of(model)))
    return told


def guarded(device: torch.device) -> Any:
    """A guard of all ranks skips what is not finite on one."""
    model = made_model(device)
    optimizer = fastamp.optim.SGD(model.parameters(), lr=0.1)
    guard = fastamp.StepGuard(optimizer, group=dist.group.WORLD)
    before = numbers_of(model)
    last = dist.get_rank() == dist.get_world_size() - 1
    told = []
    for factor in (torch.inf if last else 1.0, 1.0):
        optimizer.zero_grad()
        (model(data_of(0, 0, device)).square().mean() * factor).backward()
        optimizer.step()
        pairs = zip(before, numbers_of(model), strict=True)
        told.append(all(torch.equal(one, other) for one, other in pairs))
    guard.release()
    return told


def run(rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return {
        "ddp": ddp(device),
        "agreed": agreed(device),
        "sharded": sharded(device),
        "guarded": guarded(device),
    }
