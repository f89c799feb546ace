# SPDX-License-Identifier: Apache-2.0
"""The rule that says which products are too small for fp8, and what a region does by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastamp
from support.float8 import float8_region, outcomes

SMALL = "K and N within small_size"
ALL, SMALL_SQUARES = (fastamp.float8.Recipe(small_size=size) for size in ((0, 0), (32, 32)))


def planned(k: int, n: int, device: str = "cuda", **kwargs: Any) -> str:
    with torch.device("meta"):
        layer, x = nn.Linear(k, n), torch.empty(4, k)
    (row,) = fastamp.float8.plan(layer, x, device=device, **kwargs).rows
    return str(row.float8)


@pytest.mark.parametrize(
    ("k", "n", "outcome"),
    [
        (16, 16, SMALL),
        (4096, 1024, SMALL),
        (4112, 16, "float8"),
        (16, 1040, "float8"),
        (4112, 1040, "float8"),
        (4100, 16, "K or N not a multiple of 16"),
    ],
)
def test_on_a_gpu_a_product_is_small_whose_two_sizes_are_within_those_of_torchao(
    k: int, n: int, outcome: str
):
    assert planned(k, n) == outcome
    assert planned(k, n, recipe=fastamp.float8.Recipe(small_size=(4096, 1024))) == outcome
    runs = "float8" if outcome == SMALL else outcome
    assert planned(k, n, recipe=ALL) == planned(k, n, "cpu") == runs


def test_a_size_that_is_given_holds_on_every_device():
    for device in ("cpu", "cuda"):
        assert planned(32, 32, device, recipe=SMALL_SQUARES) == SMALL
        assert planned(48, 32, device, recipe=SMALL_SQUARES) == "float8"
        assert planned(32, 48, device, recipe=SMALL_SQUARES) == "float8"


def test_small_products_have_the_bits_of_the_base_dtype():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32, requires_grad=True)

    def bits() -> list[torch.Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y.sum(), [x, *layer.parameters()])]

    with fastamp.autocast("cpu", dtype=torch.bfloat16):
        expected = bits()
    with float8_region(float8=SMALL_SQUARES):
        assert outcomes(lambda: layer(x)) == [SMALL]
        assert all(map(torch.equal, bits(), expected))
    for recipe in (True, ALL):
        with float8_region(float8=recipe):
            assert outcomes(lambda: layer(x)) == ["float8"]
            assert not torch.equal(bits()[0], expected[0])


def test_k_and_n_are_those_of_the_product_however_the_weight_lies():
    x, weight = torch.randn(4, 48), nn.Parameter(torch.randn(48, 32))
    with float8_region(float8=fastamp.float8.Recipe(small_size=(48, 32))):
        assert outcomes(lambda: x @ weight) == [SMALL]
        assert outcomes(lambda: nn.functional.linear(x, weight.t())) == [SMALL]
    with float8_region(float8=fastamp.float8.Recipe(small_size=(32, 48))):
        assert outcomes(lambda: x @ weight) == ["float8"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_frozen_weights_inference_and_checkpoints_are_decided_alike(use_reentrant: bool):
    x, large, small = torch.randn(4, 32), nn.Linear(32, 48), nn.Linear(32, 32)
    with float8_region(float8=SMALL_SQUARES):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                assert outcomes(lambda: large(x)) == ["float8"]
                assert outcomes(lambda: small(x)) == [SMALL]

    def run() -> None:
        with float8_region(float8=SMALL_SQUARES):
            y = checkpoint(
                lambda x: large(small(x)), x.requires_grad_(), use_reentrant=use_reentrant
            )
        y.float().sum().backward()

    with fastamp.debug.trace() as trace:
        run()
    calls = {row.float8: row.calls for row in trace.rows if row.op == "linear"}
    assert calls == {SMALL: 2, "float8": 2}
    large.weight.requires_grad_(False)
    small.weight.requires_grad_(False)
    with float8_region(float8=SMALL_SQUARES):
        assert outcomes(lambda: large(x)) == ["float8"]
        assert outcomes(lambda: small(x)) == [SMALL]


@pytest.mark.parametrize("bad", [(-1, 0), (0, -(2**40))])
def test_a_negative_small_size_is_refused(bad: tuple[int, int]):
    text = r"float8.Recipe: expected small_size of the recipe to be at least 0, got \("
    with pytest.raises(ValueError, match=text):
        fastamp.float8.Recipe(small_size=bad)


@pytest.mark.parametrize("bad", [4096, [4096, 1024], (1, 2, 3), (1.0, 2), (True, 2)])
def test_a_small_size_that_is_no_pair_of_ints_is_refused(bad: Any):
    text = "float8.Recipe: expected small_size to be a tuple of two ints or None, got"
    with pytest.raises(TypeError, match=text):
        fastamp.float8.Recipe(small_size=bad)


def test_small_size_is_part_of_the_recipe_in_force():
    assert len({fastamp.float8.Recipe(), ALL, SMALL_SQUARES}) == 3
    with float8_region(float8=SMALL_SQUARES):
        assert fastamp.float8.recipe("cpu") == SMALL_SQUARES
        with float8_region():
            assert fastamp.float8.recipe("cpu").small_size is None
        assert fastamp.float8.recipe("cpu") == SMALL_SQUARES
