# SPDX-License-Identifier: Apache-2.0
"""StepGuard on four gloo ranks: all skip or none, by one collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastamp
import fastamp.optim
from support.ranks import results_of_ranks

RANKS = 4
NAN = float("nan")
MAKERS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fastamp": lambda p: fastamp.optim.AdamW(p, lr=0.1),
}


def parameters(rank: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((3,), float(rank + i))) for i in range(2)]


def collectives(function: Any) -> int:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        function()
    return int(mode.get_total_counts())


def one_bad_rank(rank: int, kind: str) -> Any:
    """Which rank has a NaN in which step, and what came of it."""
    params = parameters(rank)
    optimizer = MAKERS[kind](params)
    guard = fastamp.StepGuard(optimizer, group=dist.group.WORLD)
    trace = []
    for bad in (None, 2, 0, None):
        for i, p in enumerate(params):
            p.grad = torch.full((3,), NAN if (rank, i) == (bad, 1) else 1.0)
        before = [p.detach().clone() for p in params]
        calls = collectives(optimizer.step)
        skipped = guard.step_was_skipped
        same = all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
        report = guard.overflow_report([("a", params[0]), ("b", params[1])])
        rows = [(row.rank, row.name, row.nan) for row in report.gradients]
        trace.append((calls, skipped, same, rows, [str(row) for row in guard.history()]))
    own = guard.state_dict()["overflow_report"]["gradients"]
    return trace, [(row["name"], row["nan"]) for row in own]


def without_an_overflow(rank: int) -> int:
    params = parameters(rank)
    optimizer = MAKERS["fastamp"](params)
    guard = fastamp.StepGuard(optimizer, group=dist.group.WORLD)
    for p in params:
        p.grad = torch.ones(3)
    optimizer.step()
    return collectives(lambda: guard.overflow_report() or guard.history())


def a_rank_without_gradients(rank: int) -> Any:
    params = parameters(rank)
    optimizer = MAKERS["fastamp"](params)
    guard = fastamp.StepGuard(optimizer, group=dist.group.WORLD)
    for value in (1.0, NAN):
        for p in params:
            p.grad = None if rank == 1 else torch.full((3,), value)
        optimizer.step()
    return guard.skipped_in_a_row, [row.skipped for row in guard.history()]


def a_norm_over_ranks(rank: int, kind: str) -> Any:
    """The flag travels with the norm."""
    params = parameters(rank)
    optimizer = MAKERS[kind](params)
    guard = fastamp.StepGuard(optimizer, group=dist.group.WORLD)
    trace = []
    for bad, loss in ((None, False), (3, False), (None, True), (None, False)):
        for p in params:
            p.grad = torch.full((3,), NAN if rank == bad else 1.0)
        norms = []

        def step(loss=loss, norms=norms):
            norms.append(guard.clip_grad_norm_(1.0, mesh={dist.group.WORLD: None}))
            if loss:
                guard.check_loss(torch.tensor(NAN if rank == 1 else 1.0))
            optimizer.step()

        before = [p.detach().clone() for p in params]
        calls = collectives(step)
        same = all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
        trace.append((calls, str(norms[0].item()), guard.step_was_skipped, same))
    return trace


def sharded(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (RANKS,))
    trace = []
    for options in ({}, {"skip": "spike", "spike_window": 2, "spike_factor": 3.0}):
        weight = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        parameter = torch.nn.Parameter(weight)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        guard = fastamp.StepGuard(optimizer, **options)
        for bad, factor in ((None, 1.0), (None, 1.0), (1, 1.0), (None, 100.0), (None, 1.0)):
            local = torch.full((2,), NAN if rank == bad else factor)
            parameter.grad = DTensor.from_local(local, mesh, [Shard(0)])
            before = parameter.to_local().detach().clone()
            optimizer.step()
            same = torch.equal(before, parameter.to_local())
            trace.append((guard.step_was_skipped, same))
    return trace


def shards_without_gradients(rank: int, clips: bool) -> Any:
    """One rank has none, and has to reach the collectives of the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (RANKS,))
    parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
    optimizer = fastamp.optim.AdamW([parameter], lr=0.1)
    guard = fastamp.StepGuard(optimizer)
    trace = []
    for value in (2.0, NAN, 2.0):
        local = torch.full((2,), value)
        parameter.grad = None if rank == 1 else DTensor.from_local(local, mesh, [Shard(0)])
        norm = str(guard.clip_grad_norm_(1.0).item()) if clips else ""
        optimizer.step()
        trace.append((guard.step_was_skipped, norm))
    return trace


def worker(rank: int) -> dict[str, Any]:
    return {
        "bad torch": one_bad_rank(rank, "torch"),
        "bad fastamp": one_bad_rank(rank, "fastamp"),
        "quiet": without_an_overflow(rank),
        "no gradients": a_rank_without_gradients(rank),
        "norm torch": a_norm_over_ranks(rank, "torch"),
        "norm fastamp": a_norm_over_ranks(rank, "fastamp"),
        "sharded": sharded(rank),
        "no gradients on a mesh": shards_without_gradients(rank, False),
        "no gradients, clipped": shards_without_gradients(rank, True),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    yield from results_of_ranks(worker, tmp_path_factory, RANKS)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_nan_on_one_rank_changes_no_bit_on_any(ranks: Any, kind: str):
    for rank in range(RANKS):
        trace, own = ranks[rank][f"bad {kind}"]
        assert [step[0] for step in trace] == [1, 1, 1, 1]  # collectives
        assert [step[1] for step in trace] == [False, True, True, False]
        assert [step[2] for step in trace] == [False, True, True, False]
        # The first rank gets all, with the rank beside the parameter; others their own.
        of_2, of_0 = [(2, "b", 3)] * (rank in (0, 2)), [(0, "b", 3)] * (rank == 0)
        assert [step[3] for step in trace] == [[], of_2, of_0, of_0]
        assert own == ([("parameter 1", 3)] if rank == 0 else [])


def test_without_an_overflow_a_report_sends_nothing(ranks: Any):
    assert [each["quiet"] for each in ranks] == [0] * RANKS


def test_a_rank_without_gradients_takes_part(ranks: Any):
    assert [each["no gradients"] for each in ranks] == [(1, [False, True])] * RANKS


@pytest.mark.parametrize("kind", MAKERS)
def test_the_flag_travels_with_a_norm_over_the_ranks(ranks: Any, kind: str):
    for each in ranks:
        trace = each[f"norm {kind}"]
        # The norm's sum; a loss is a rank's own, and takes the flag's MAX.
        assert [step[0] for step in trace] == [1, 1, 2, 1]
        assert [step[1] == "nan" for step in trace] == [False, True, False, False]
        assert [step[2] for step in trace] == [False, True, True, False]
        assert [step[3] for step in trace] == [False, True, True, False]


def test_shards_are_guarded_over_their_mesh(ranks: Any):
    plain = [(False, False), (False, False), (True, True), (False, False), (False, False)]
    spikes = [*plain[:3], (True, True), (False, False)]
    assert [each["sharded"] for each in ranks] == [[*plain, *spikes]] * RANKS


def test_a_rank_without_gradients_takes_part_in_what_its_mesh_decides(ranks: Any):
    steps = [False, True, False]
    norms = ["4.898979663848877", "nan", "4.898979663848877"]  # of 3 ranks with 2 elements each
    for each in ranks:
        assert each["no gradients on a mesh"] == [(skipped, "") for skipped in steps]
        assert each["no gradients, clipped"] == list(zip(steps, norms, strict=True))
