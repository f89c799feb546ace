# SPDX-License-Identifier: Apache-2.0
"""Sharded training on two gloo processes: FSDP2, our optimizers, clipping, one rank overflowing."""

import pytest
import torch
import torch.distributed as dist

import fastamp
import fastamp.optim
from support.ranks import results_of_two_ranks

STEPS, BAD_STEP = 8, 4


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 6, generator=generator)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train_sharded(rank, make_optimizer, bad_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = make_optimizer(model.parameters())
    scaler = fastamp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    trace = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(batch(step, rank)).square().mean()).backward()
        if step == BAD_STEP and rank == bad_rank:
            next(model.parameters()).grad.to_local()[0, 0] = float("inf")
        norm = scaler.clip_grad_norm_(optimizer, 0.01)
        scaler.step(optimizer)
        scaler.update()
        named = {gradient.name for gradient in scaler.overflow_report(model).gradients}
        trace.append((norm.item(), scaler.step_was_skipped, scaler.get_scale(), named))
    return trace, [full(p.detach()).tolist() for p in model.parameters()]


def train_alone(make_optimizer):
    """The same on one process with torch.amp: gradients are the mean over both ranks' batches."""
    model = model_of()
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    trace = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            scaler.scale(model(batch(step, rank)).square().mean() / 2).backward()
        if step == BAD_STEP:
            next(model.parameters()).grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        trace.append((norm.item(), step == BAD_STEP, scaler.get_scale()))
    return trace, [p.detach().tolist() for p in model.parameters()]


def train_grouped(rank):
    """Plain tensors, our optimizer, agreement over an explicit group."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = fastamp.optim.AdamW([parameter], lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=16.0, process_group=dist.group.WORLD)
    trace = []
    for step in range(4):
        scaler.scale(torch.ones(()))
        bad = step == 1 and rank == 0
        parameter.grad = torch.full((3,), float("nan") if bad else 16.0)
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        trace.append((scaler.step_was_skipped, scaler.get_scale(), parameter[0].item()))
    return trace


def clip_after_collective(rank):
    """A collective edits gradients without counting a version; the norm must be the new one."""
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 8.0 * (rank + 1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    dist.all_reduce(parameter.grad)
    return fastamp.clip_grad_norm_([parameter], 100.0).item()


OPTIMIZERS = {
    "torch.SGD": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "torch.AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "fastamp.SGD": lambda p: fastamp.optim.SGD(p, lr=0.5, momentum=0.9),
    "fastamp.AdamW": lambda p: fastamp.optim.AdamW(p, lr=0.05),
}


def worker(rank):
    out = {
        (name, bad_rank): train_sharded(rank, make, bad_rank)
        for name, make in OPTIMIZERS.items()
        for bad_rank in range(2)
    }
    out["grouped"] = train_grouped(rank)
    out["collective"] = clip_after_collective(rank)
    return out


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    yield from results_of_two_ranks(worker, tmp_path_factory)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_shards_train_as_one_process_does_and_skip_together(ranks, name, bad_rank):
    kind = name.removeprefix("fastamp.").removeprefix("torch.")
    expected, weights = train_alone(OPTIMIZERS[f"torch.{kind}"])
    for rank in ranks:
        trace, own = rank[name, bad_rank]
        for (norm, skipped, scale, _), wanted in zip(trace, expected, strict=True):
            assert (skipped, scale) == wanted[1:]
            assert norm == pytest.approx(wanted[0], rel=1e-4, nan_ok=True)
        for left, right in zip(own, weights, strict=True):
            torch.testing.assert_close(
                torch.tensor(left), torch.tensor(right), rtol=1e-4, atol=1e-6
            )
    assert ranks[0][name, bad_rank][1] == ranks[1][name, bad_rank][1]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_each_rank_reports_its_own_shard(ranks, name):
    for number, rank in enumerate(ranks):
        for bad_rank in range(2):
            names = rank[name, bad_rank][0][-1][3]
            assert names == ({"0.weight"} if bad_rank == number else set())


def test_fastamps_optimizers_skip_together_over_a_group(ranks):
    assert ranks[0]["grouped"] == ranks[1]["grouped"]
    trace = ranks[0]["grouped"]
    assert [skipped for skipped, _, _ in trace] == [False, True, False, False]
    assert trace[1][2] == trace[0][2]
    assert trace[1][1] == 8.0


def test_a_norm_is_not_taken_from_before_a_collective(ranks):
    assert ranks[0]["collective"] == ranks[1]["collective"] == pytest.approx(6.0)
