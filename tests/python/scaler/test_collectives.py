# SPDX-License-Identifier: Apache-2.0
"""Which calls of a scaler communicate, and over what: two gloo processes on the CPU."""

import pytest
import torch
import torch.distributed as dist

import fastamp
import fastamp.optim
from support.ranks import results_of_two_ranks

# What each call does with gradients sharded over a mesh of one dimension: flags are agreed on
# where gradients are unscaled, and a norm is summed up where it is asked for, in one if that is
# the same call.
CALLS = {
    ("unscale_", "norm", "step", "update"): (1, 1, 0, 0),
    ("norm", "step", "update"): (1, 0, 0),
    ("norm", "norm", "step", "update"): (1, 1, 0, 0),
    ("inf norm", "step", "update"): (1, 0, 0),
    ("unscale_", "value", "step", "update"): (1, 0, 0, 0),
    ("step", "update"): (1, 0),
}
# Clipping by value: put off to the step, which unscales, where the optimizer takes an AmpStep.
VALUE = ("value", "step", "update")
# What checks again, for an AmpStep, what clip_grad_norm_ has checked and left to the step.
AGAIN = {
    ("norm", "norm", "step", "update"): (1, 1, 0, 0),
    ("norm", "unscale_", "step", "update"): (1, 1, 0, 0),
    ("norm", "edit", "step", "update"): (1, 0, 1, 0),
    ("norm", "value", "step", "update"): (1, 0, 0, 0),
}


def mesh_of(*shape):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape)


def parameter_on(mesh, placements, value=8.0):
    from torch.distributed.tensor import DTensor

    parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh, placements))
    parameter.grad = DTensor.from_local(torch.full((4,), value), mesh, placements)
    return parameter


def plain_parameter():
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 8.0)
    return parameter


def counted(optimizer, calls, group=None):
    """The number of collectives of each call."""
    from torch.distributed.tensor.debug import CommDebugMode

    scaler = fastamp.GradScaler("cpu", init_scale=4.0, process_group=group)
    scaler.scale(torch.ones(()))
    make = {
        "norm": lambda: scaler.clip_grad_norm_(optimizer, 1.0),
        "inf norm": lambda: scaler.clip_grad_norm_(optimizer, 1.0, float("inf")),
        "value": lambda: scaler.clip_grad_value_(optimizer, 1.0),
        "unscale_": lambda: scaler.unscale_(optimizer),
        "step": lambda: scaler.step(optimizer),
        "edit": lambda: optimizer.param_groups[0]["params"][0].grad.mul_(2.0),
        "update": scaler.update,
    }
    counts = []
    for call in calls:
        with CommDebugMode() as communication:
            make[call]()
        counts.append(communication.get_total_counts())
    return tuple(counts)


def skips(rank, bad_rank, bad_position):
    """Parameters on two meshes and with two placements; one shard of one of them overflows."""
    from torch.distributed.tensor import Replicate, Shard

    line, plane = mesh_of(2), mesh_of(1, 2)
    layouts = [
        (line, [Shard(0)]),
        (line, [Replicate()]),
        (plane, [Replicate(), Shard(0)]),
        (plane, [Shard(0), Replicate()]),
    ]
    bad = float("inf") if rank == bad_rank else 8.0
    parameters = [
        parameter_on(mesh, placements, bad if position == bad_position else 8.0)
        for position, (mesh, placements) in enumerate(layouts)
    ]
    optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    weights = [parameter.to_local().tolist() for parameter in parameters]
    return scaler.step_was_skipped, scaler.get_scale(), weights


def worker(rank):
    from torch.distributed.tensor import Replicate, Shard

    out = {}
    for kind, module in (("fastamp", fastamp.optim), ("torch", torch.optim)):
        for calls in (*CALLS, VALUE):
            optimizers = {
                "shards": module.SGD([parameter_on(mesh_of(2), [Shard(0)])], lr=1.0),
                "replicas": module.SGD([parameter_on(mesh_of(2), [Replicate()])], lr=1.0),
                "plain": module.SGD([plain_parameter()], lr=1.0),
                "group": module.SGD([plain_parameter()], lr=1.0),
            }
            for where, optimizer in optimizers.items():
                group = dist.group.WORLD if where == "group" else None
                out[kind, where, calls] = counted(optimizer, calls, group)
    for calls in AGAIN:
        optimizer = fastamp.optim.SGD([plain_parameter()], lr=1.0)
        out["again", calls] = counted(optimizer, calls, dist.group.WORLD)
    for bad_rank in range(2):
        for position in range(4):
            out["skips", bad_rank, position] = skips(rank, bad_rank, position)
    out["clean"] = skips(rank, None, None)
    return out


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    yield from results_of_two_ranks(worker, tmp_path_factory)


kinds = pytest.mark.parametrize("kind", ["fastamp", "torch"])


@kinds
@pytest.mark.parametrize("calls", CALLS)
def test_calls_on_shards_communicate_where_they_say(ranks, kind, calls):
    for rank in ranks:
        assert rank[kind, "shards", calls] == CALLS[calls]
        # Replicas know the norm; they still agree on the flag.
        assert sum(rank[kind, "replicas", calls]) == 1


@kinds
def test_clipping_by_value_checks_or_unscales_at_once(ranks, kind):
    for rank in ranks:
        assert rank[kind, "shards", VALUE] == rank[kind, "group", VALUE] == (1, 0, 0)


@kinds
@pytest.mark.parametrize("calls", [*CALLS, VALUE])
def test_plain_gradients_communicate_over_a_group_only(ranks, kind, calls):
    # A second clip does at once what was put off to the step: gradients are checked again.
    again = kind == "fastamp" and calls.count("norm") == 2
    for rank in ranks:
        assert sum(rank[kind, "plain", calls]) == 0
        assert sum(rank[kind, "group", calls]) == (2 if again else 1)


@pytest.mark.parametrize("calls", AGAIN)
def test_what_is_checked_again_is_agreed_on_again(ranks, calls):
    assert ranks[0]["again", calls] == ranks[1]["again", calls] == AGAIN[calls]


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("position", range(4))
def test_an_overflow_on_any_mesh_and_placement_skips_everywhere(ranks, bad_rank, position):
    for rank in ranks:
        assert rank["skips", bad_rank, position] == (True, 2.0, [[1.0] * 4] * 4)
        assert rank["clean"] == (False, 4.0, [[-1.0] * 4] * 4)
