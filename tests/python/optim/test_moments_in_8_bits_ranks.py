# SPDX-License-Identifier: Apache-2.0
"""Moments in 8 bits on two gloo processes: shards of rows have the bits of the whole tensor."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as checkpoint

import fastamp.optim
from support.amp_reference import assert_same_bits
from support.ranks import results_of_two_ranks

CODES = ("exp_avg_8", "exp_avg_sq_8", "moment_scales_8")
# Rows that do not divide evenly, groups of each size, and one parameter without codes.
SHAPES = ((65, 128), (128, 64), (129, 2, 48), (9, 9))
FULL = checkpoint.StateDictOptions(full_state_dict=True)


def gradients(step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def make(params):
    return fastamp.optim.AdamW(params, lr=0.01, state_dtype="8bit")


def start():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def states_of(optimizer, params):
    def full(t):
        return t.full_tensor() if hasattr(t, "full_tensor") else t.clone()

    return [{key: full(value) for key, value in optimizer.state[p].items()} for p in params]


def sharded(placement):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    params = [torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [placement])) for p in start()]
    optimizer = make(params)
    for step in range(4):
        for p, gradient in zip(params, gradients(step), strict=True):
            p.grad = distribute_tensor(gradient, mesh, [placement])
        optimizer.step()
    portable = optimizer.state_dict(portable=True)["state"]
    moments = {n: s["exp_avg"].full_tensor() for n, s in portable.items()}
    return states_of(optimizer, params), moments


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 33))


def fully_sharded():
    """A checkpoint of all ranks' shards, and how training goes on."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shards = fully_shard(model(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = make(shards.parameters())
    saved = None
    for step in range(4):
        if step == 2:
            # Counters are the optimizer's own tensors.
            saved = copy.deepcopy(checkpoint.get_state_dict(shards, optimizer, options=FULL))
        for p, g in zip(
            shards.parameters(),
            gradients(step, [p.shape for p in shards.parameters()]),
            strict=True,
        ):
            local = torch.chunk(g, 2)[dist.get_rank()]
            p.grad = type(p).from_local(
                local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )
        optimizer.step()
    return saved, checkpoint.get_state_dict(shards, optimizer, options=FULL)


def worker(_):
    from torch.distributed.tensor import Replicate, Shard

    return {
        "rows": sharded(Shard(0)),
        "copies": sharded(Replicate()),
        "columns": sharded(Shard(1)),
        "fsdp": fully_sharded(),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    yield from results_of_two_ranks(worker, tmp_path_factory)


@pytest.fixture(scope="module")
def whole():
    params = start()
    optimizer = make(params)
    for step in range(4):
        for p, gradient in zip(params, gradients(step), strict=True):
            p.grad = gradient
        optimizer.step()
    moments = {n: s["exp_avg"] for n, s in optimizer.state_dict(portable=True)["state"].items()}
    return states_of(optimizer, params), moments


@pytest.mark.parametrize("kind", ["rows", "copies"])
def test_shards_of_rows_have_the_codes_of_the_whole(ranks, whole, kind):
    for result in ranks:
        states, moments = result[kind]
        for mine, other in zip(states, whole[0], strict=True):
            assert mine.keys() == other.keys()
            for key, value in mine.items():
                assert_same_bits(value, other[key])
        for n, value in moments.items():
            assert_same_bits(value, whole[1][n])


def test_shards_that_would_cut_groups_have_moments_in_bfloat16(ranks):
    for result in ranks:
        for state in result["columns"][0]:
            assert state["exp_avg"].dtype is torch.bfloat16
            assert CODES[0] not in state


def test_a_checkpoint_of_shards_goes_on_in_one_process(ranks):
    (saved_model, saved), (final_model, final) = ranks[0]["fsdp"]
    assert saved["state"]["0.weight"][CODES[0]].dtype is torch.uint8
    resumed = model()
    optimizer = make(resumed.parameters())
    checkpoint.set_state_dict(
        resumed, optimizer, model_state_dict=saved_model, optim_state_dict=saved
    )
    for step in (2, 3):
        shapes = [p.shape for p in resumed.parameters()]
        for p, g in zip(resumed.parameters(), gradients(step, shapes), strict=True):
            p.grad = g
        optimizer.step()
    for name, p in resumed.named_parameters():
        assert_same_bits(p.detach(), final_model[name])
        for key, value in optimizer.state[p].items():
            assert_same_bits(value, final["state"][name][key])
