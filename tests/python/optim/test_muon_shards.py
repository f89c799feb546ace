# SPDX-License-Identifier: Apache-2.0
"""fastamp.optim.Muon on DTensors and FSDP2 models: two gloo processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fastamp.optim
from fastamp._C import AmpStep
from support.ranks import results_of_two_ranks

SHAPES = ((5, 3), (4, 6), (5, 3), (1, 8))  # Of the last, one rank has no row.


def full(tensor):
    if tensor.dtype == torch.int16:  # gloo gathers none
        tensor = tensor.float()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def stepped(sharded, dtype, **options):
    """Three steps, one of them skipped, of sharded, replicated and plain matrices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    placements = [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0)]]

    def spread(tensor, where):
        return distribute_tensor(tensor, mesh, where) if sharded else tensor

    params = [
        torch.nn.Parameter(spread(torch.randn(shape).to(dtype), where))
        for shape, where in zip(SHAPES, placements, strict=True)
    ]
    params.append(torch.nn.Parameter(torch.randn(5, 3).to(dtype)))
    optimizer = fastamp.optim.Muon(params, lr=0.1, **options)
    for flag in (0.0, 1.0, 0.0):
        for p, where in zip(params, [*placements, None], strict=True):
            gradient = torch.randn(p.shape).to(dtype)
            p.grad = spread(gradient, where) if where else gradient
        optimizer._fastamp_pending_amp_step = AmpStep(
            inv_scale=torch.tensor(0.5), found_inf=torch.tensor(flag)
        )
        optimizer.step()
    states = [{key: full(v).clone() for key, v in optimizer.state[p].items()} for p in params]
    return [full(p.detach()).clone() for p in params], states


def fsdp(optimizer_type):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 7, bias=False), torch.nn.Tanh(), torch.nn.Linear(7, 2, bias=False)
    )
    plain = [p.detach().clone() for p in model.parameters()]
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = optimizer_type(model.parameters(), lr=0.05)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    moved = [full(p.detach()).clone() for p in model.parameters()]
    assert not any(torch.equal(p, q) for p, q in zip(moved, plain, strict=True))
    return moved


def worker(_):
    out = {}
    for dtype, options in (
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"master": "remainder", "ns_dtype": torch.float16}),
    ):
        key = (str(dtype), len(options))
        out[key] = stepped(True, dtype, **options), stepped(False, dtype, **options)
    out["fsdp"] = fsdp(fastamp.optim.Muon), fsdp(torch.optim.Muon)
    return out


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    yield from results_of_two_ranks(worker, tmp_path_factory)


@pytest.mark.slow
def test_shards_have_the_bits_of_the_whole_matrix(ranks):
    for out in ranks:
        for key in [key for key in out if key != "fsdp"]:
            (values, states), (others, other_states) = out[key]
            assert all(torch.equal(p, q) for p, q in zip(values, others, strict=True)), key
            for state, other in zip(states, other_states, strict=True):
                assert state.keys() == other.keys()
                for name, value in state.items():
                    assert torch.equal(value, other[name]), (key, name)


@pytest.mark.slow
def test_fsdp2_models_train_as_with_torchs(ranks):
    """torch runs the iteration on DTensors, whose sums of 16-bit products have another order."""
    first, second = (out["fsdp"] for out in ranks)
    assert all(torch.equal(p, q) for p, q in zip(first[0], second[0], strict=True))
    for p, q in zip(*first, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=3 * 0.05 * 0.05 * 7**0.5)
