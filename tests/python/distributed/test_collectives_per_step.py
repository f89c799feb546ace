# SPDX-License-Identifier: Apache-2.0
"""Collectives and bytes of flag and norm in a step, on 8 simulated ranks: the table of the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastamp
import fastamp.optim
from support.simulated_ranks import CallMade, own_calls, run_on_ranks

GUIDE = Path(__file__).parents[3] / "docs" / "distributed.md"
RANKS = 8
SETUPS = {
    "`fully_shard`, one mesh dimension": "fsdp",
    "`fully_shard`, HSDP": "hsdp",
    "`fully_shard` and tensor parallel": "tensor",
    "two stages of `fully_shard`": "stages",
}


def spread(kind: str) -> tuple[Any, Any]:
    """A model of 6 parameters, and the mesh dimension of its stages."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    model: Any = torch.nn.Sequential(*layers)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (RANKS,))
    else:
        mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("outer", "inner"))
    over = mesh["inner"] if kind == "stages" else mesh
    if kind == "tensor":
        styles: Any = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        styles["2"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["inner"], styles)
        over = mesh["outer"]
    fully_shard(model, mesh=over)
    return model, mesh["outer"] if kind == "stages" else None


def step_with_fastamps(model: Any, stages: Any) -> None:
    group = dist.group.WORLD if stages else None
    scaler = fastamp.GradScaler("cpu", process_group=group)
    optimizer = fastamp.optim.AdamW(model.parameters())
    scaler.scale(torch.ones(()))
    scaler.clip_grad_norm_(optimizer, 1.0, mesh={stages: None} if stages else None)
    scaler.step(optimizer)
    scaler.update()


def step_with_torchs(model: Any, stages: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    clip_by_hand(model, stages)
    scaler.step(optimizer)
    scaler.update()


def clip_by_hand(model: Any, stages: Any) -> None:
    """What torchtitan's clip asks of torch: the norm in full, and its sum over stages."""
    gradients = [p.grad for p in model.parameters()]
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor()
    if stages:
        norm = norm.square()
        dist.all_reduce(norm, group=stages.get_group())
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)


def calls_of(kind: str, step: Any) -> list[CallMade]:
    def work(rank: int) -> int:
        model, stages = spread(kind)
        x = torch.ones(2, 8) if kind == "tensor" else torch.full((2, 8), float(rank))
        model(x).square().mean().backward()
        before = len(own_calls())
        step(model, stages)
        return before

    made = []
    for outcome in run_on_ranks(RANKS, work):
        assert outcome.error is None, outcome.error
        made.append(outcome.calls[outcome.result :])
    assert made == [made[0]] * RANKS
    return made[0]


def described(calls: list[CallMade]) -> str:
    assert {call.kind for call in calls} <= {"AllReduce"}
    return f"{len(calls)}, {sum(call.bytes for call in calls)} bytes"


def rows() -> dict[str, list[str]]:
    text = GUIDE.read_text(encoding="utf-8")
    table = text[text.index("| Flag and norm of a step |") :].split("\n\n")[0]
    cells = [re.split(r"\s*\|\s*", line.strip("| ")) for line in table.splitlines()[2:]]
    return {name: values for name, *values in cells}


@pytest.mark.parametrize("name", SETUPS)
def test_the_table_has_what_is_counted(name):
    kind = SETUPS[name]
    counted = [
        described(calls_of(kind, s)) for s in (step_with_fastamps, step_with_torchs, clip_by_hand)
    ]
    assert rows()[name] == counted


def test_flag_and_norm_share_one_collective():
    (call,) = calls_of("fsdp", step_with_fastamps)
    assert call == CallMade("AllReduce", RANKS, (("float64", 2),))
