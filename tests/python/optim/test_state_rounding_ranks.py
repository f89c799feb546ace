# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding on two gloo processes: replicas keep their bits, shards have the whole's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fastamp.optim
from support.amp_reference import assert_same_bits
from support.ranks import results_of_two_ranks

SHAPES = ((5, 3), (7,), (129, 33), (6, 4))
STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def gradients(step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def make(params):
    return fastamp.optim.AdamW(params, lr=0.01, amsgrad=True, state_dtype=torch.bfloat16)


def start(shapes=SHAPES):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def states_of(optimizer, params):
    def full(t):
        return t.full_tensor() if hasattr(t, "full_tensor") else t.clone()

    return [[full(optimizer.state[p][key]) for key in STATES] for p in params]


def replicated():
    """200 steps of DDP, whose ranks see other data; the random generators drift apart as well."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = make(model.parameters())
    torch.manual_seed(100 + dist.get_rank())
    torch.rand(dist.get_rank())
    torch.set_num_threads(1 + dist.get_rank())
    for _ in range(200):
        optimizer.zero_grad()
        ddp(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    params = list(model.parameters())
    return [p.detach().clone() for p in params], states_of(optimizer, params)


def sharded(placement):
    """Four steps of DTensors from gradients that both ranks know."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    params = [torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [placement])) for p in start()]
    optimizer = make(params)
    for step in range(4):
        for p, gradient in zip(params, gradients(step), strict=True):
            p.grad = distribute_tensor(gradient, mesh, [placement])
        optimizer.step()
    return states_of(optimizer, params)


def fully_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    whole = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    params = list(model.parameters())
    optimizer, reference = make(params), make(whole)
    for step in range(4):
        for p, q, g in zip(params, whole, gradients(step, [q.shape for q in whole]), strict=True):
            q.grad = g
            local = g.chunk(2)[dist.get_rank()]
            p.grad = type(p).from_local(
                local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )
        optimizer.step()
        reference.step()
    return states_of(optimizer, params), states_of(reference, whole)


def zero_redundancy():
    """Each rank steps its part of the parameters and sends them to the other."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    params = start()
    optimizer = ZeroRedundancyOptimizer(
        params, fastamp.optim.AdamW, lr=0.01, state_dtype=torch.bfloat16
    )
    for step in range(20):
        for p, gradient in zip(params, gradients(step), strict=True):
            p.grad = gradient
        optimizer.step()
    return [p.detach().clone() for p in params]


def worker(_):
    from torch.distributed.tensor import Replicate, Shard

    return {
        "replicated": replicated(),
        "rows": sharded(Shard(0)),
        "copies": sharded(Replicate()),
        "fsdp": fully_sharded(),
        "zero": zero_redundancy(),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    yield from results_of_two_ranks(worker, tmp_path_factory)


@pytest.fixture(scope="module")
def whole():
    """The same four steps in one process."""
    params = start()
    optimizer = make(params)
    for step in range(4):
        for p, gradient in zip(params, gradients(step), strict=True):
            p.grad = gradient
        optimizer.step()
    return states_of(optimizer, params)


def assert_same_states(first, second):
    for mine, other in zip(first, second, strict=True):
        for value, expected in zip(mine, other, strict=True):
            assert_same_bits(value, expected)


def test_replicas_hold_the_same_bits_after_200_steps(ranks):
    (params, states), (others, other_states) = (out["replicated"] for out in ranks)
    for p, q in zip(params, others, strict=True):
        assert_same_bits(p, q)
    assert_same_states(states, other_states)


@pytest.mark.parametrize("placement", ["rows", "copies"])
def test_shards_of_rows_have_the_bits_of_the_whole(ranks, whole, placement):
    for out in ranks:
        assert_same_states(out[placement], whole)


def test_fsdp2_shards_have_the_bits_of_the_whole(ranks):
    for out in ranks:
        assert_same_states(*out["fsdp"])


def test_zero_leaves_the_same_parameters_on_all_ranks(ranks):
    for p, q in zip(*(out["zero"] for out in ranks), strict=True):
        assert_same_bits(p, q)
