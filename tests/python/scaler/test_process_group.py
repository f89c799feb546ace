# SPDX-License-Identifier: Apache-2.0
"""Agreement between ranks: two gloo processes on the CPU where one alone overflows."""

import copy

import pytest
import torch
import torch.distributed as dist

import fastamp
from support.ranks import results_of_two_ranks


class Watching(torch.optim.SGD):
    """Skips by itself; notes the flag it is given."""

    _step_supports_amp_scaling = True

    def step(self, _closure=None):
        self.flag = float(self.found_inf)


def train(rank, group, history, optimizer_type):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optimizer_type([parameter], lr=0.5)
    scaler = fastamp.GradScaler("cpu", init_scale=16.0, growth_interval=2, process_group=group)
    trace = []
    for gradients in history:
        scaler.scale(torch.ones(()))
        value = gradients[rank]
        parameter.grad = None if value is None else torch.full((3,), value)
        scaler.step(optimizer)
        flag = scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item()
        scaler.update()
        trace.append(
            (flag, getattr(optimizer, "flag", None), scaler.state_dict(), parameter[0].item())
        )
    return trace


def dtensors(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    results = []
    for bad_rank in (None, 0, 1):
        weight = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        parameter = torch.nn.Parameter(weight)
        local = torch.full((2,), float("inf") if rank == bad_rank else 8.0)
        parameter.grad = DTensor.from_local(local, mesh, [Shard(0)])
        plain = torch.nn.Parameter(torch.ones(1))
        plain.grad = torch.full((1,), 8.0)
        scaler = fastamp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        optimizer = torch.optim.SGD([parameter, plain], lr=1.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        results.append(
            (scaler.get_scale(), parameter.to_local().tolist(), plain.item(), plain.grad.item())
        )
    return results


def worker(rank):
    inf, nan = float("inf"), float("nan")
    history = [(1.0, 1.0), (inf, 1.0), (1.0, nan), (nan, inf), (None, 2.0), (inf, None), (1.0, 1.0)]
    out = {
        "sgd": train(rank, dist.group.WORLD, history, torch.optim.SGD),
        "fused": train(rank, dist.group.WORLD, history, Watching),
        "alone": train(rank, None, [(1.0, 1.0), (inf, 1.0)], torch.optim.SGD),
        "dtensor": dtensors(rank),
    }
    grouped = fastamp.GradScaler("cpu", process_group=dist.group.WORLD)
    out["copy shares the group"] = copy.deepcopy(grouped).process_group is dist.group.WORLD
    return out


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    yield from results_of_two_ranks(worker, tmp_path_factory)


def test_if_one_rank_overflows_all_skip_and_keep_equal_states(ranks):
    left, right = ranks[0]["sgd"], ranks[1]["sgd"]
    assert [step[0] for step in left] == [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert [step[0] for step in left] == [step[0] for step in right]
    assert [step[2] for step in left] == [step[2] for step in right]
    assert left[3][3] == left[0][3]  # Nothing moved in the skipped steps.
    assert left[6][2]["scale"] == 1.0


def test_a_rank_without_gradients_takes_part(ranks):
    assert ranks[0]["sgd"][4][0] == 0.0
    assert ranks[0]["sgd"][4][3] == ranks[0]["sgd"][3][3]
    assert ranks[1]["sgd"][5][0] == 1.0


def test_the_path_of_fused_optimizers_agrees_too(ranks):
    flags = [[step[1] for step in rank["fused"]] for rank in ranks]
    assert flags[0] == flags[1] == [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0]


def test_without_a_group_nothing_is_exchanged(ranks):
    assert ranks[0]["alone"][1][0] == 1.0
    assert ranks[1]["alone"][1][0] == 0.0


def test_shards_agree_over_their_mesh(ranks):
    assert ranks[0]["dtensor"][0] == ranks[1]["dtensor"][0] == (4.0, [-1.0, -1.0], -1.0, 2.0)
    for rank in ranks:
        for scale, weight, plain, gradient in rank["dtensor"][1:]:
            assert (scale, weight, plain, gradient) == (2.0, [1.0, 1.0], 1.0, 2.0)


def test_a_copy_shares_the_group(ranks):
    assert ranks[0]["copy shares the group"]
