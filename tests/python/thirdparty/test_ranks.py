# SPDX-License-Identifier: Apache-2.0
"""DDP, FSDP and DTensor on two gloo processes, with fastamp installed in each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy

from patience import patience
from support.twin_runs import (
    assert_same,
    installed_fastamp,
    is_fastamps,
    parameters_of,
    plain_torch,
    region_counts,
)

BF16, FP16 = torch.bfloat16, torch.float16
SECONDS = 900  # on two idle cores
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60)]


def network() -> nn.Sequential:
    torch.manual_seed(1)  # the same on both ranks
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4))


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, torch.distributed.tensor.DTensor) else value


def train(model: nn.Module, scaler: Any, dtype: torch.dtype, clip: bool = True) -> Any:
    """Five steps; at the second the loss of rank 1 alone is infinite, if there is a scaler."""
    rank = dist.get_rank()
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(4, 8), torch.arange(4)
    trace = []
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            output = model(x)
            loss = cross_entropy(output, y)
        bad = scaler.is_enabled() and step == 1 and rank == 1
        scaler.scale(loss * float("inf") if bad else loss).backward()
        scaler.unscale_(optimizer)
        norm = full(nn.utils.clip_grad_norm_(model.parameters(), 0.5)).item() if clip else None
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), str(output.dtype), norm, scaler.get_scale()))
    return trace, {name: full(p.detach()).clone() for name, p in model.named_parameters()}


def torch_scaler(**options: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2, **options)
    assert is_fastamps(scaler)
    return scaler


def ddp_bf16() -> Any:
    model = nn.parallel.DistributedDataParallel(network())
    return train(model, torch_scaler(enabled=False), BF16)


def ddp_fp16() -> Any:
    return train(nn.parallel.DistributedDataParallel(network()), torch_scaler(), FP16)


class Shared(nn.Module):
    """Three layers read one activation, whose cast they share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 8)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).float().tanh()
        return self.last(torch.softmax(self.q(h) @ self.k(h).mT, -1) @ self.v(h))


def ddp_hooked_bf16() -> Any:
    """Gradients are compressed on their way, live in the buckets, and pass a hook of their own."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    module = Shared()
    seen: list[torch.Tensor] = []
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
    model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    model.register_comm_hook(None, fp16_compress_hook)
    return seen, train(model, torch_scaler(enabled=False), BF16)


def ddp_accumulating() -> Any:
    model = nn.parallel.DistributedDataParallel(network(), static_graph=False, bucket_cap_mb=1)
    with model.no_sync(), torch.autocast("cpu", dtype=BF16):
        model(torch.ones(2, 8)).float().sum().backward()
    held = [p.grad.clone() for p in model.parameters()]
    with torch.autocast("cpu", dtype=BF16):
        model(torch.ones(2, 8)).float().sum().backward()
    return held, [p.grad for p in model.parameters()], parameters_of(model)


def fsdp2(scaler: Any, dtype: torch.dtype, mixed: bool = False, clip: bool = True) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh = network(), init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options = {"mp_policy": policy} if mixed else {}
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **options)
    return train(model, scaler, dtype, clip)


def fsdp2_bf16() -> Any:
    return fsdp2(torch_scaler(enabled=False), BF16)


def fsdp2_bf16_policy() -> Any:
    return fsdp2(torch_scaler(enabled=False), BF16, mixed=True)


def fsdp2_fp16() -> Any:
    return fsdp2(torch_scaler(), FP16)


def fsdp2_sharded_scaler() -> Any:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    scaler = ShardedGradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    assert type(scaler) is ShardedGradScaler
    return fsdp2(scaler, FP16)


def fsdp1_sharded_scaler() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)
    trace, _ = train(model, ShardedGradScaler("cpu", init_scale=2.0**12), FP16, clip=False)
    with FullyShardedDataParallel.summon_full_params(model):
        return trace, parameters_of(model)


def tensor_parallel() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype=BF16):
        output = model(torch.randn(4, 8))
    output.float().square().sum().backward()
    return output.detach(), [full(p.grad) for p in model.parameters()]


JOBS: dict[str, Callable[[], Any]] = {
    job.__name__: job
    for job in (
        ddp_bf16,
        ddp_fp16,
        ddp_hooked_bf16,
        ddp_accumulating,
        fsdp2_bf16,
        fsdp2_bf16_policy,
        fsdp2_fp16,
        fsdp2_sharded_scaler,
        fsdp1_sharded_scaler,
        tensor_parallel,
    )
}


def attempt(job: Callable[[], Any]) -> Any:
    try:
        return job()
    except Exception as error:  # the parent shows it
        return f"{type(error).__name__}: {error}"


def worker(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=patience(300)),
    )
    results: dict[str, Any] = {}
    for name, job in JOBS.items():
        with region_counts() as counts, plain_torch():
            torchs = attempt(job)
        with region_counts() as own_counts, installed_fastamp():
            own = attempt(job)
        results[name] = (torchs, own, max(counts), max(own_counts))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    if sys.platform == "win32" or not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")
    folder = tmp_path_factory.mktemp("ranks")
    children = mp.spawn(worker, args=(str(folder),), nprocs=2, join=False)
    deadline = time.monotonic() + patience(SECONDS)
    try:
        while not children.join(timeout=5):
            assert time.monotonic() < deadline, "the ranks did not end"
    finally:
        for process in children.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", JOBS)
def test_ranks_train_with_torchs_bits(ranks: list[dict[str, Any]], name: str):
    for rank in ranks:
        torchs, own, torchs_regions, own_regions = rank[name]
        assert not isinstance(torchs, str), torchs
        assert torchs_regions == 0
        assert own_regions > 0
        assert_same(own, torchs)


@pytest.mark.parametrize("name", [name for name in JOBS if name.endswith(("fp16", "scaler"))])
def test_one_rank_that_overflows_makes_all_skip(ranks: list[dict[str, Any]], name: str):
    scales = [[step[3] for step in rank[name][1][0]] for rank in ranks]
    assert scales[0] == scales[1]
    assert scales[0][1] == scales[0][0] / 2
    parameters = [rank[name][1][1] for rank in ranks]
    assert_same(parameters[0], parameters[1])
    assert all(torch.isfinite(p).all() for p in parameters[0].values())
