# SPDX-License-Identifier: Apache-2.0
"""DTensor and FSDP2 parameters: two gloo processes, each stepping its shards."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist

import fastamp.optim
from fastamp._C import AmpStep
from support.ranks import results_of_two_ranks

OPTIONS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "AdamW": {"lr": 0.1, "amsgrad": True},
}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sharded(optimizer_type, options, amp_step=None, dtype=torch.float32):
    """Three steps of a sharded, a replicated and a plain parameter; values, states, placements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    placements = [[Shard(0)], [Replicate()]]
    params = [
        torch.nn.Parameter(distribute_tensor(torch.randn(5, 3).to(dtype), mesh, where))
        for where in placements
    ] + [torch.nn.Parameter(torch.randn(4).to(dtype))]
    optimizer = optimizer_type(params, **options)
    for _ in range(3):
        for p, where in zip(params, [*placements, None], strict=True):
            gradient = torch.randn(p.shape).to(dtype)
            p.grad = distribute_tensor(gradient, mesh, where) if where else gradient
        if amp_step is not None:
            optimizer._fastamp_pending_amp_step = AmpStep(inv_scale=torch.tensor(amp_step))
        optimizer.step()
    states = [
        {key: full(value).clone() for key, value in optimizer.state[p].items()} for p in params
    ]
    kinds = [type(value).__name__ for value in optimizer.state[params[0]].values()]
    return [full(p.detach()).clone() for p in params], states, kinds


def fsdp(optimizer_type, options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = optimizer_type(model.parameters(), **options)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [full(p.detach()).clone() for p in model.parameters()]


def mismatched():
    """A gradient that is replicated, for a parameter that is sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    p = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()])
    fastamp.optim.SGD([p], lr=1.0).step()
    return full(p.detach()).clone()


def checkpointed(name):
    """Through torch.distributed.checkpoint's view of an optimizer, full state on every rank."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    results = []
    for resume in (False, True):
        torch.manual_seed(2)
        model = torch.nn.Linear(4, 3).to(torch.bfloat16)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = getattr(fastamp.optim, name)(model.parameters(), **OPTIONS[name])
        for step in range(4):
            if resume and step == 2:
                options = StateDictOptions(full_state_dict=True)
                saved = get_optimizer_state_dict(model, optimizer, options=options)
                optimizer.zero_grad()
                optimizer = getattr(fastamp.optim, name)(model.parameters(), **OPTIONS[name])
                set_optimizer_state_dict(model, optimizer, saved, options=options)
            for p in model.parameters():
                local = torch.full_like(p._local_tensor, 1.0 + step)
                p.grad = type(p).from_local(
                    local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
                )
            optimizer.step()
        results.append([full(p.detach()).clone() for p in model.parameters()])
    return results


def shard_after_its_parameter_got_another():
    """Whether a step keeps the shard that it reads, and what it makes of both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    optimizer = fastamp.optim.AdamW([param], lr=0.1)
    prepare, shard = optimizer._fastamp_prepare, weakref.ref(param._local_tensor)
    was_alive = []

    def replace_shard(param, group):
        prepare(param, group)
        param._local_tensor = param._local_tensor.clone()
        was_alive.append(shard() is not None)

    optimizer._fastamp_prepare = replace_shard
    optimizer.step()
    return was_alive, param._local_tensor


def worker(_):
    out = {}
    for name, options in OPTIONS.items():
        own, torchs = getattr(fastamp.optim, name), getattr(torch.optim, name)
        out[name] = sharded(own, options), sharded(torchs, options)
        out[name, "amp_step"] = sharded(own, options, 0.25), sharded(own, options)
        out[name, "bf16"] = sharded(own, options, dtype=torch.bfloat16)
        out[name, "fsdp"] = fsdp(own, options), fsdp(torchs, options)
        out[name, "checkpoint"] = checkpointed(name)
    out["mismatched"] = mismatched()
    out["replaced"] = shard_after_its_parameter_got_another()
    return out


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    yield from results_of_two_ranks(worker, tmp_path_factory)


names = pytest.mark.parametrize("name", OPTIONS)


@names
def test_shards_are_stepped_as_torch_steps_them(ranks, name):
    for out in ranks:
        (values, states, kinds), (others, other_states, _) = out[name]
        for p, q in zip(values, others, strict=True):
            torch.testing.assert_close(p, q)
        for state, other in zip(states, other_states, strict=True):
            for key, value in other.items():
                torch.testing.assert_close(state[key], value)
        assert kinds.count("DTensor") == (1 if name == "SGD" else 3)


@names
def test_all_ranks_hold_the_same(ranks, name):
    for key in (name, (name, "fsdp")):
        first, second = (out[key][0] for out in ranks)
        first, second = (first[0], second[0]) if key == name else (first, second)
        assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@names
def test_fsdp2_models_train_as_with_torch(ranks, name):
    for out in ranks:
        for p, q in zip(*out[name, "fsdp"], strict=True):
            torch.testing.assert_close(p, q)


@names
def test_shards_pass_the_amp_step(ranks, name):
    takes_amp_step, plain = ranks[0][name, "amp_step"]
    assert not torch.equal(takes_amp_step[0][0], plain[0][0])
    if name == "SGD":
        buffer, other = (states[0]["momentum_buffer"] for _, states, _ in (takes_amp_step, plain))
        torch.testing.assert_close(buffer, other * 0.25, rtol=0.5, atol=0.5)


@names
def test_masters_of_shards_are_shards(ranks, name):
    values, states, kinds = ranks[0][name, "bf16"]
    for p, state in zip(values, states, strict=True):
        assert state["master_param"].dtype == torch.float32
        assert torch.equal(state["master_param"].to(torch.bfloat16), p)
    assert kinds.count("DTensor") == (2 if name == "SGD" else 4)


@names
def test_distributed_checkpoints_continue_bit_for_bit(ranks, name):
    for out in ranks:
        whole, resumed = out[name, "checkpoint"]
        assert all(torch.equal(p, q) for p, q in zip(whole, resumed, strict=True))


def test_steps_keep_the_shards_that_they_read(ranks):
    for out in ranks:
        was_alive, new = out["replaced"]
        assert was_alive == [True]
        assert torch.equal(new, torch.ones(2))


def test_gradients_sharded_otherwise_are_left_to_torch(ranks):
    for out in ranks:
        assert torch.equal(out["mismatched"], torch.full((4, 2), -1.0))
