# SPDX-License-Identifier: Apache-2.0
"""Weights that fully_shard gathers in fp8: bits of casting after the gather, half the bytes."""

from __future__ import annotations

import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.optimizer import _global_optimizer_post_hooks

import fastamp
import fastamp.distributed
import fastamp.optim
from fastamp._util.watched_step import has_hooks
from support.amp_reference import assert_same_bits
from support.float8 import dequantized, float8_region
from support.simulated_ranks import CallMade, own_calls, run_on_ranks

float8_all_gather = fastamp.distributed.float8_all_gather
BF16 = torch.bfloat16
GUIDE = (Path(__file__).parents[3] / "docs" / "distributed.md").read_text(encoding="utf-8")


def results(ranks: int, work: Any) -> list[Any]:
    outcomes = run_on_ranks(ranks, work)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
    return [outcome.result for outcome in outcomes]


class Model(nn.Module):
    """Three weights that run in fp8; a head that does not, since 10 is no multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.norm, self.wide, self.head = nn.LayerNorm(64), nn.Linear(64, 80), nn.Linear(80, 10)
        with torch.no_grad():  # The largest magnitude of a weight is on one rank alone.
            for layer in (*self.layers, self.wide):
                layer.weight[40] *= 300

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(torch.relu(layer(x)))
        return self.head(self.wide(x))


NAMES = ["wide.weight", "layers.0.weight", "layers.1.weight"]


def sharded(policy: Any = None, mesh: Any = None, **options: Any) -> Any:
    model: Any = Model()
    if mesh is None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if policy is not None:
        options["mp_policy"] = policy
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 64, generator=generator)


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    copied: torch.Tensor = tensor.detach().clone()
    return copied


def train(model: Any, rank: int, steps: int = 3, dtype: Any = BF16) -> list[torch.Tensor]:
    """Two passes before each step."""
    optimizer = fastamp.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        for part in range(2):
            with float8_region(dtype=dtype):
                loss = model(batch(rank, 10 * step + part)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses + [whole(p) for p in model.parameters()]


POLICIES = {
    "float32": None,
    "bfloat16": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "float16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_training_has_the_bits_of_casting_after_the_gather(policy, ranks):
    def work(rank: int) -> Any:
        dtype = torch.float16 if policy == "float16" else BF16
        expected = train(sharded(POLICIES[policy]), rank, dtype=dtype)
        model = sharded(POLICIES[policy])
        gather = float8_all_gather(model)
        assert sorted(gather.names) == sorted(NAMES)
        return expected, train(model, rank, dtype=dtype)

    for expected, found in results(ranks, work):
        assert len(found) == 6 + 10
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize(
    "options", [{"reshard_after_forward": False}, {"shard_placement_fn": None}], ids=str
)
def test_other_ways_of_sharding_have_these_bits_too(options):
    from torch.distributed.tensor import Shard

    if "shard_placement_fn" in options:
        options = {
            "shard_placement_fn": lambda p: Shard(p.ndim - 1) if p.shape[-1] % 2 == 0 else None
        }

    def work(rank: int) -> Any:
        expected = train(sharded(POLICIES["bfloat16"], **options), rank)
        model = sharded(POLICIES["bfloat16"], **options)
        float8_all_gather(model)
        return expected, train(model, rank)

    for expected, found in results(2, work):
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)


def test_copies_of_shards_are_gathered_by_their_own_group():
    def work(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        expected = train(sharded(POLICIES["bfloat16"], mesh), rank)
        model = sharded(POLICIES["bfloat16"], mesh)
        float8_all_gather(model)
        return expected, train(model, rank)

    for expected, found in results(4, work):
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)


def calls_of_a_pass(model: Any, rank: int) -> list[CallMade]:
    before = len(own_calls())
    one_pass(model, rank)
    return own_calls()[before:]


def gathered_bytes(calls: list[CallMade]) -> int:
    return sum(call.bytes for call in calls if "AllGather" in call.kind)


def one_pass(model: Any, rank: int) -> None:
    with float8_region():
        loss = model(batch(rank, 0)).float().square().mean()
    loss.backward()


class Wide(nn.Module):
    """Whose bytes are those of weights, as a language model's are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


def test_half_the_bytes_are_gathered_and_one_all_reduce_is_made_for_each_step():
    def work(rank: int) -> Any:
        told = []
        for in_float8 in (False, True):
            model: Any = Wide()
            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=POLICIES["bfloat16"])
            fully_shard(model, mesh=mesh, mp_policy=POLICIES["bfloat16"])
            if in_float8:
                float8_all_gather(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            calls = []
            for _ in range(2):
                calls += [calls_of_a_pass(model, rank) for _ in range(2)]
                optimizer.step()
            told.append(calls)
        return told

    for plain, in_float8 in results(2, work):
        for before, after in zip(plain, in_float8, strict=True):
            given = gathered_bytes(before), gathered_bytes(after)
            assert given == (8 * 2048 * 2, 8 * 2048)  # At most 0.51 of bfloat16's was the aim.
            assert f"| weights, forward and backward | {given[0]} | {given[1]} |" in GUIDE
        agreed = [[c for c in calls if c.kind == "AllReduce"] for calls in in_float8]
        once = [CallMade("AllReduce", 2, (("float32", 4),))]
        assert agreed == [once, [], once, []]
        for before, after, more in zip(plain, in_float8, agreed, strict=True):
            assert len(after) == len(before) + len(more)


def test_regions_cast_no_weight():
    def work(rank: int) -> Any:
        counts = []
        for in_float8 in (False, True):
            model = sharded(POLICIES["bfloat16"])
            if in_float8:
                float8_all_gather(model)
            with fastamp.debug.trace() as trace:
                one_pass(model, rank)
            rows = [row for row in trace.rows if row.op == "linear" and row.float8 == "float8"]
            counts.append(
                [
                    sum(row.calls for row in rows),
                    sum(row.weight_casts for row in rows),
                    sum(row.other_casts for row in rows),
                ]
            )
        return counts

    assert results(1, work) == [[[3, 3, 3], [3, 0, 3]]]  # A trace sees the threads of all ranks.


def test_outside_of_fp8_the_weights_are_the_fp8_numbers():
    def work(rank: int) -> Any:
        model = sharded()
        float8_all_gather(model)
        weight = whole(model.wide.weight)
        x = batch(rank, 0)
        seen = []
        model.wide.register_forward_pre_hook(lambda module, _: seen.append(module.weight.clone()))
        with torch.no_grad():
            model(x)
        assert_same_bits(seen[0], dequantized(weight))
        refused = []

        def edit(module: Any, _: Any) -> None:
            with pytest.raises(TypeError, match="edit the sharded one"), torch.no_grad():
                module.weight.mul_(2)
            refused.append(str(module.weight))

        model.wide.register_forward_pre_hook(edit)
        with torch.no_grad():
            model(x)
        assert "GatheredWeight(shape=(80, 64)" in refused[0]

    results(2, work)


def test_edits_and_checkpoints_are_seen():
    def work(rank: int) -> Any:
        pairs = []
        for in_float8 in (False, True):
            model = sharded(POLICIES["bfloat16"])
            if in_float8:
                float8_all_gather(model)
            losses = train(model, rank, steps=1)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(3)
            losses += train(model, rank, steps=1)
            state = model.state_dict()
            assert all(type(each._local_tensor) is torch.Tensor for each in state.values())
            file = io.BytesIO()
            torch.save({k: v.to_local() for k, v in state.items()}, file)
            file.seek(0)
            read = torch.load(file, weights_only=True)
            again = {
                k: DTensor.from_local(
                    5 * read[k], v.device_mesh, v.placements, shape=v.shape, stride=v.stride()
                )
                for k, v in state.items()
            }
            model.load_state_dict(again, assign=True)
            losses += train(model, rank, steps=2)
            model.load_state_dict({k: v * 0.5 for k, v in again.items()})
            pairs.append(losses + train(model, rank, steps=1))
        return pairs

    for expected, found in results(3, work):
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)


def test_an_edit_of_parts_is_told():
    def work(rank: int) -> Any:
        pairs = []
        for in_float8 in (False, True):
            model = sharded()
            gather = float8_all_gather(model) if in_float8 else None
            losses = train(model, rank, steps=1)
            if rank == 0:  # One rank alone sees it: the others would not ask.
                model.wide.weight.to_local().data.mul_(100)
            if gather is not None:
                gather.refresh()
            pairs.append(losses + train(model, rank, steps=1))
        return pairs

    for expected, found in results(2, work):
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)


def test_with_tensor_parallelism_scales_are_those_of_the_whole_weight():
    """Shards of a column-parallel weight have the casts that the unsharded layer has."""

    def spread(is_gathered_in_float8: bool) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        with torch.no_grad():  # The largest magnitudes are on one rank of each mesh alone.
            model[0].weight[40, 40] *= 2000
            model[2].weight[40, 40] *= 2000
        styles = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["tensor"], styles)
        fully_shard(model, mesh=mesh["data"], mp_policy=POLICIES["bfloat16"])
        if is_gathered_in_float8:
            assert len(float8_all_gather(model).names) == 2
        return model

    def work(rank: int) -> Any:
        return [train(spread(in_float8), rank // 2) for in_float8 in (False, True)]

    for expected, found in results(4, work):
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)


def test_what_is_left_out():
    def work(_: int) -> Any:
        told = []
        model: Any = Model()
        model.tied = nn.Embedding(64, 64)
        model.tied.weight = model.layers[0].weight
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with fastamp.float8.exclude(model.wide):
            told.append(float8_all_gather(model).names)
        model = sharded()
        recipe = fastamp.float8.Recipe(small_size=(64, 64))
        told.append(float8_all_gather(model, recipe).names)
        return told

    assert results(2, work)[0] == [["layers.1.weight"], ["wide.weight"]]


def test_bad_input_is_refused_and_changes_nothing():
    name = "distributed.float8_all_gather"

    def work(rank: int) -> Any:
        refused: Any = pytest.raises
        with refused(TypeError, match=f"{name}: expected model to be a module, got int"):
            float8_all_gather(3)  # type: ignore[arg-type]
        with refused(
            TypeError, match=f"{name}: expected recipe to be a float8.Recipe or None, got"
        ):
            float8_all_gather(sharded(), True)  # type: ignore[arg-type]
        with refused(ValueError, match="that fully_shard has sharded .* got none"):
            float8_all_gather(Model())
        model = sharded()
        float8_all_gather(model)
        with refused(ValueError, match="got a weight that has all-gather functions already"):
            float8_all_gather(model)
        late = sharded()
        with torch.no_grad():
            late(batch(rank, 0))
        with refused(ValueError, match="before its first forward pass, got one that has run"):
            float8_all_gather(late)
        assert not hasattr(late.layers[0].weight._local_tensor, "fsdp_pre_all_gather")
        some = sharded(reshard_after_forward=2)
        with refused(NotImplementedError, match="True or False, got a number of ranks"):
            float8_all_gather(some)
        other = fastamp.float8.Recipe(
            forward_dtype=torch.float8_e5m2, grad_dtype=torch.float8_e4m3fn
        )
        with (
            refused(ValueError, match="expected the region's recipe to have forward_dtype"),
            float8_region(float8=other),
        ):
            model(batch(rank, 0))

    results(4, work)


def test_parts_that_tensor_parallelism_makes_too_narrow_are_refused():
    def work(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        model: Any = nn.Sequential(nn.Linear(64, 16))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        float8_all_gather(model)
        with pytest.raises(
            ValueError, match=r"0.weight on a rank .* multiples of 16, got \(8, 64\)"
        ):
            model(batch(rank, 0))

    results(2, work)


def test_a_model_that_is_gone_has_no_part_in_steps_and_changes_no_table_of_torch():
    """Torch may be going through its hooks when the model is collected."""

    def work(_: int) -> Any:
        for _ in range(2):
            gc.collect()  # Models of other tests.
        optimizer = fastamp.optim.AdamW(nn.Linear(2, 2).parameters())
        assert not has_hooks(optimizer)
        model = sharded()
        float8_all_gather(model)
        assert has_hooks(optimizer)
        table = dict(_global_optimizer_post_hooks)
        del model
        for _ in range(2):
            gc.collect()  # The model and its tensors; then what these were the last to hold.
        return has_hooks(optimizer), table == _global_optimizer_post_hooks

    assert results(1, work) == [(False, True)]
