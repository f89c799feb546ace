# SPDX-License-Identifier: Apache-2.0
"""The simulated NCCL: in one process by torch.cuda.nccl, between processes by torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.cuda import nccl

from support.ranks import results_of_two_ranks
from support.simulated_cuda import counted, late_work

pytestmark = pytest.mark.simulated
DEVICES = ("cuda:0", "cuda:1")
DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int64)


def pair(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [(8 * torch.randn(shape)).to(dtype).to(device) for device in DEVICES]


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64], ids=str
)
def test_collectives_of_one_process(dtype, late):
    one, other = pair(6, dtype=dtype)
    total = one.cpu() + other.cpu()
    results = [torch.zeros_like(one), torch.zeros_like(other)]
    gathered = [torch.zeros(12, dtype=dtype, device=device) for device in DEVICES]
    parts = [torch.zeros(3, dtype=dtype, device=device) for device in DEVICES]
    with late_work() if late else torch.no_grad(), counted("collectives") as counts:
        nccl.all_reduce([one, other], results)
        nccl.all_gather([one, other], gathered)
        nccl.reduce_scatter([one, other], parts)
        nccl.reduce([one, other], output=results[0], root=0)
        nccl.broadcast([one, other])
        values = [t.cpu() for t in (*results, *gathered, *parts, other)]
    own = one.cpu()
    assert all(torch.equal(value, total) for value in values[:2])
    assert all(torch.equal(value, values[2]) for value in values[2:4])
    assert torch.equal(values[2][:6], own)
    assert torch.equal(torch.cat(values[4:6]), total)
    assert torch.equal(values[6], own)
    assert counts["collectives"] == 10


def test_a_data_parallel_model_computes_on_both_devices():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, device="cuda:0")
    x = torch.randn(6, 4, device="cuda:0")
    wanted = model(x)
    parallel = torch.nn.DataParallel(model)
    with counted("collectives") as counts:
        got = parallel(x)
        got.sum().backward()
    assert torch.equal(got, wanted)
    assert counts["collectives"] > 0
    gradient = model.weight.grad
    assert gradient is not None
    torch.testing.assert_close(gradient, x.sum(0).expand(3, 4))


def test_memory_of_another_device_is_refused(capfd):
    one, other = pair(3)
    stream = torch.cuda.Stream("cuda:1")
    with pytest.raises(RuntimeError, match="NCCL"):
        nccl.all_reduce([one, other], streams=[stream, stream])
    assert "another device than the communicator's" in capfd.readouterr().err


def exchanged(rank: int) -> dict[str, Any]:
    """What a rank has after each of torch.distributed's collectives."""
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    x = torch.arange(4.0, device="cuda") + 10 * rank
    told: dict[str, Any] = {}
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        told[name] = x.clone()
        dist.all_reduce(told[name], getattr(dist.ReduceOp, name))
    told["broadcast"] = x.clone()
    dist.broadcast(told["broadcast"], 1)
    told["gathered"] = torch.zeros(8, device="cuda")
    dist.all_gather_into_tensor(told["gathered"], x)
    told["scattered"] = torch.zeros(2, device="cuda")
    dist.reduce_scatter_tensor(told["scattered"], x)
    told["exchanged"] = torch.zeros(4, device="cuda")
    dist.all_to_all_single(told["exchanged"], x)
    sent, got = x.clone(), torch.zeros(4, device="cuda")
    peer = 1 - rank
    calls = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    told["received"] = got
    alone = [dist.new_group([each]) for each in range(2)][rank]
    told["alone"] = x.clone()
    dist.all_reduce(told["alone"], group=alone)
    graph, captured = torch.cuda.CUDAGraph(), x.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        dist.all_reduce(captured)
    graph.replay()
    graph.replay()
    told["captured"] = captured
    with late_work():
        told["late"] = x.clone()
        handle = dist.all_reduce(told["late"], async_op=True)
        unwaited = told["late"].clone()  # torch's operators run when they are called
        handle.wait()
        told["late"] = told["late"].cpu()
    told["unwaited"] = unwaited
    dist.barrier()
    return {name: value.tolist() for name, value in told.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> Iterator[list[Any]]:
    yield from results_of_two_ranks(exchanged, tmp_path_factory, backend="nccl")


def test_collectives_of_two_processes(ranks):
    own = [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]
    both = [10.0, 12.0, 14.0, 16.0]
    for rank, told in enumerate(ranks):
        assert told["SUM"] == told["late"] == both
        assert told["AVG"] == [5.0, 6.0, 7.0, 8.0]
        assert told["MAX"] == told["broadcast"] == own[1]
        assert told["MIN"] == own[0]
        assert told["PRODUCT"] == [0.0, 11.0, 24.0, 39.0]
        assert told["gathered"] == own[0] + own[1]
        assert told["scattered"] == both[2 * rank : 2 * rank + 2]
        assert told["exchanged"] == [own[each][2 * rank + i] for each in (0, 1) for i in (0, 1)]
        assert told["received"] == own[1 - rank]
        assert told["alone"] == own[rank]
        assert told["captured"] == [2 * value for value in both]


def test_who_does_not_wait_reads_what_was_there_before(ranks):
    assert [told["unwaited"] for told in ranks] == [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]
