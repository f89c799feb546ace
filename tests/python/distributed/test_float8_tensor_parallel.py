# SPDX-License-Identifier: Apache-2.0
"""Linear layers of DTensors in fp8 regions: the casts of the whole tensors, on each rank's part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fastamp
from support.amp_reference import assert_same_bits
from support.float8 import E5M2, dequantized, float8_region
from support.simulated_ranks import own_calls, run_on_ranks

linear = nn.functional.linear
M, K, N = 32, 128, 64
BF16 = torch.bfloat16


def results(ranks: int, work: Any) -> list[Any]:
    outcomes = run_on_ranks(ranks, work)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
    return [outcome.result for outcome in outcomes]


def uneven(*shape: int, seed: int) -> torch.Tensor:
    """Numbers whose rows and columns differ in size so far that a part's own scale would show."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for dim, size in enumerate(shape[-2:]):
        falling = torch.arange(size).mul(-14.0 / size).floor().exp2()
        x = x * (falling[:, None] if dim == 0 else falling)
    return x


def whole() -> list[torch.Tensor]:
    return [uneven(M, K, seed=0), uneven(N, K, seed=1), torch.randn(N), uneven(M, N, seed=2)]


def traced(function: Any) -> tuple[Any, set[str]]:
    with fastamp.debug.trace() as trace:
        result = function()
    return result, {row.float8 for row in trace.rows if row.op == "linear"}


LAYOUTS = {
    "columns": (Replicate(), Shard(0), Shard(0)),
    "rows": (Shard(1), Shard(1), Replicate()),
    "batch": (Shard(0), Replicate(), Replicate()),
    "whole": (Replicate(), Replicate(), Replicate()),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_multiplied_by_the_casts_of_the_whole(layout, ranks):
    of_x, of_weight, of_bias = LAYOUTS[layout]

    def work(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (ranks,))
        torch.manual_seed(3)
        x, weight, bias, grad = whole()
        spread = [
            distribute_tensor(t, mesh, [p]).requires_grad_()
            for t, p in ((x, of_x), (weight, of_weight), (bias, of_bias))
        ]

        def run() -> Any:
            with float8_region():
                return linear(*spread)

        y, outcomes = traced(run)
        assert outcomes == {"float8"}
        assert y.dtype == BF16
        assert y.shape == (M, N)
        placement = y.placements[0]
        of_grad = Replicate() if placement.is_partial() else placement
        grad = grad.to(BF16)
        y.backward(distribute_tensor(grad, mesh, [of_grad]))

        def part(t: torch.Tensor, placement: Any) -> torch.Tensor:
            return distribute_tensor(t, mesh, [placement]).to_local()

        x8, weight8 = part(dequantized(x), of_x), part(dequantized(weight), of_weight)
        grad8, own = part(dequantized(grad, E5M2), of_grad), part(grad, of_grad)
        expected, added = x8 @ weight8.t(), part(bias, of_bias).to(BF16)
        if not placement.is_partial() or rank == 0:
            expected += added
        assert_same_bits(y.to_local(), expected.to(BF16))
        found = [t.grad._local_tensor for t in spread]
        assert_same_bits(found[0], grad8 @ weight8)
        assert_same_bits(found[1], grad8.t() @ x8)
        torch.testing.assert_close(found[2], own.float().sum(0))
        return [str(t.grad.placements[0]) for t in spread], str(placement)

    told = results(ranks, work)
    assert told == [told[0]] * ranks
    partial = str(Partial())
    assert (
        told[0]
        == {
            "columns": ([partial, "S(0)", "S(0)"], "S(1)"),
            "rows": (["S(1)", "S(1)", "R"], partial),
            "batch": (["S(0)", partial, partial], "S(0)"),
            "whole": (["R", "R", "R"], "R"),
        }[layout]
    )


class Block(nn.Module):
    """Whose sums are of small whole numbers, and so do not depend on their order."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            kept = torch.rand(p.shape, generator=generator) < 0.1
            signs = torch.randint(-1, 2, p.shape, generator=generator)
            p.data = torch.where(kept, signs.float(), 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def ones(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def run_block(block: Any) -> list[torch.Tensor]:
    x = ones(2, 16, 64, seed=1).requires_grad_()
    with float8_region():
        y = block(x)
    y.backward(ones(2, 16, 64, seed=2).to(y.dtype))
    found = [y, x.grad, *(p.grad for p in block.parameters())]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach() for t in found]


@pytest.mark.parametrize("ranks", [2, 4])
def test_column_and_row_parallel_layers_have_the_bits_of_whole_ones(ranks):
    def work(_: int) -> Any:
        mesh, block = init_device_mesh("cpu", (ranks,)), Block()
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        found, outcomes = traced(lambda: run_block(block))
        assert outcomes == {"float8"}
        return found

    expected, outcomes = traced(lambda: run_block(Block()))
    assert outcomes == {"float8"}
    for found in results(ranks, work):
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)


def test_ranks_agree_by_one_number_for_each_operand_that_is_spread():
    def work(_: int) -> Any:
        mesh, counts = init_device_mesh("cpu", (2,)), []
        x, weight, bias, grad = whole()
        for of_x, of_weight, of_bias in LAYOUTS.values():
            spread = [
                distribute_tensor(t, mesh, [p]).requires_grad_()
                for t, p in ((x, of_x), (weight, of_weight), (bias, of_bias))
            ]
            before = len(own_calls())
            with float8_region():
                y = linear(*spread)
            forward = len(own_calls())
            of_y = y.placements[0]
            y_grad = distribute_tensor(
                grad.bfloat16(), mesh, [Replicate() if of_y.is_partial() else of_y]
            )
            middle = len(own_calls())
            y.backward(y_grad)
            counts.append([own_calls()[before:forward], own_calls()[middle:]])
        return counts

    for counts in results(2, work):
        sizes = [[[call.sizes for call in calls] for calls in each] for each in counts]
        one, two = [(("float32", 1),)], [(("float32", 2),)]
        assert sizes == [[one, one], [two, []], [one, one], [[], []]]


def mm_of_parts(x: Any, weight: Any) -> Any:
    return torch.mm(x, weight.t())


STAY = {
    "the sum over ranks is still to be made": (linear, (M, K), (N, K), Partial(), Shard(0)),
    "parts of K are no multiples of 16": (linear, (M, 48), (N, 48), Shard(1), Shard(1)),
    "rows of a batch that ranks do not share evenly": (
        linear,
        (31, K),
        (N, K),
        Shard(0),
        Replicate(),
    ),
    "another op": (mm_of_parts, (M, K), (N, K), Replicate(), Shard(0)),
    "layouts that are no part of the product": (linear, (M, K), (N, K), Shard(0), Shard(0)),
}


@pytest.mark.parametrize("name", STAY)
def test_other_dtensors_run_in_the_base_dtype_on_all_ranks(name):
    op, x_shape, weight_shape, of_x, of_weight = STAY[name]

    def work(_: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        x, weight = ones(*x_shape, seed=0), ones(*weight_shape, seed=1)
        x_there = (
            DTensor.from_local(x, mesh, [of_x])
            if of_x.is_partial()
            else distribute_tensor(x, mesh, [of_x])
        )
        weight_there = distribute_tensor(weight, mesh, [of_weight]).requires_grad_()
        with fastamp.autocast("cpu", dtype=BF16):
            expected = op(x_there, weight_there)
        with fastamp.debug.trace() as trace, float8_region():
            found = op(x_there, weight_there)
        reasons = {row.float8 for row in trace.rows}
        assert "float8" not in reasons
        assert_same_bits(found.full_tensor(), expected.full_tensor())
        return reasons

    first, second = results(2, work)
    assert first == second


def test_exclusions_and_small_sizes_are_those_of_the_whole_weight():
    def work(_: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        x, weight, *_ = whole()
        there = distribute_tensor(x, mesh, [Replicate()])
        weight_there = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()

        def run(float8: Any = True) -> set[str]:
            def product() -> None:
                with float8_region(float8=float8):
                    linear(there, weight_there)

            return traced(product)[1]

        told = [run(fastamp.float8.Recipe(small_size=size)) for size in ((K, N), (K, N - 1))]
        told.append(run(fastamp.float8.Recipe(ops=("mm",))))
        with fastamp.float8.exclude([weight_there]):
            told.append(run())
        return told

    small, ran, op, excluded = results(2, work)[0]
    assert small == {"K and N within small_size"}
    assert ran == {"float8"}
    assert op == {"op not in recipe"}
    assert excluded == {"excluded"}


def test_without_gradients_nothing_is_recorded():
    def work(_: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        x, weight, *_ = whole()
        there = distribute_tensor(x, mesh, [Replicate()])
        weight_there = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
        with float8_region():
            recorded = linear(there, weight_there)
            with torch.no_grad():
                found = linear(there, weight_there)
        assert recorded.requires_grad
        assert not found.requires_grad
        assert_same_bits(found.to_local(), recorded.to_local())

    results(2, work)
