# SPDX-License-Identifier: Apache-2.0
"""The rule that says which products pay in fp8: its numbers, and what a region does by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastamp
import fastamp._C as _C
from fastamp._float8 import fields_of
from support import float8_model
from support.float8 import float8_region, outcomes
from support.float8_model import GPUS, Layer

GPU = "H200 SXM"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# At most 65536 of each, so that the numbers of elements stay exact in a float64.
SIZES = st.integers(1, 4096).map(lambda number: 16 * number)
LAYERS = st.builds(
    Layer,
    st.integers(1, 65536),
    SIZES,
    SIZES,
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


def rows_of(
    layers: list[Layer],
    gpu: str = GPU,
    recipe: fastamp.Float8Recipe | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> list[dict[str, Any]]:
    fields = fields_of(recipe or fastamp.Float8Recipe())
    return _C.float8_plan_of_shapes([layer.fields() for layer in layers], gpu, fields, dtype)


def row_of(layer: Layer, **kwargs: Any) -> dict[str, Any]:
    (row,) = rows_of([layer], **kwargs)
    return row


@pytest.fixture
def pretended_gpu() -> Iterator[None]:
    """The rule is asked on the CPU too, for an H200."""
    _C.pretend_float8_gpu(GPU)
    yield
    _C.pretend_float8_gpu("")


@settings(deadline=None, max_examples=300)
@given(LAYERS, st.sampled_from(sorted(GPUS)), st.sampled_from(DTYPES[1:]))
def test_predictions_are_those_of_the_model_in_the_docs(layer: Layer, gpu: str, dtype: torch.dtype):
    row = row_of(layer, gpu=gpu, dtype=dtype)
    model = GPUS[gpu]
    assert row["carrier_seconds"] == pytest.approx(float8_model.carrier(model, layer, dtype)[0])
    assert row["float8_seconds"] == pytest.approx(float8_model.in_float8(model, layer)[0])
    assert row["gain"] == pytest.approx(float8_model.gain(model, layer, dtype))
    assert (row["float8"] == "float8") == (row["gain"] >= 1.1)
    assert row["float8"] in ("float8", "gain below min_gain")


def test_constants_are_those_that_the_model_was_written_with():
    # When a first run on a GPU has fitted them, the figures of docs/float8.md change as well.
    for entry in _C.float8_constants():
        gpu = GPUS[entry["name"]]
        assert entry["carrier_rate"] == gpu.carrier
        assert entry["float8_rate"] == gpu.float8
        assert entry["bandwidth"] == gpu.bandwidth
        assert entry["launch_seconds"] == gpu.launch
        assert entry["multiprocessors"] == gpu.units
        assert entry["min_work"] == gpu.min_work


# docs/float8.md, "When it will pay": linear layers of one block, (K, N, is x float32).
MODELS = {
    "ViT-B/16": (12608, "bias", [(768, 2304, 1), (768, 768, 0), (768, 3072, 1), (3072, 768, 0)]),
    "GPT-2 124M": (8192, "bias", [(768, 2304, 1), (768, 768, 0), (768, 3072, 1), (3072, 768, 0)]),
    "GPT-2 XL": (
        8192,
        "bias",
        [(1600, 4800, 1), (1600, 1600, 0), (1600, 6400, 1), (6400, 1600, 0)],
    ),
    "Llama 1B": (
        8192,
        "",
        [*[(2048, 2048, 0)] * 2, *[(2048, 512, 0)] * 2, *[(2048, 8192, 0)] * 2, (8192, 2048, 0)],
    ),
    "Llama 8B": (
        8192,
        "",
        [*[(4096, 4096, 0)] * 2, *[(4096, 1024, 0)] * 2, *[(4096, 14336, 0)] * 2, (14336, 4096, 0)],
    ),
}
# All layers in fp8, whatever the rule says: milliseconds in 16 bits and the speed-up.
PUBLISHED = {
    "ViT-B/16": (1.14, 1.21),
    "GPT-2 124M": (0.77, 1.18),
    "GPT-2 XL": (2.59, 1.37),
    "Llama 1B": (4.45, 1.33),
    "Llama 8B": (15.1, 1.48),
}


def layers_of(model: str) -> list[Layer]:
    m, bias, sizes = MODELS[model]
    dtypes = (torch.bfloat16, torch.float32)
    return [Layer(m, k, n, dtypes[wide], bias=bool(bias)) for k, n, wide in sizes]


@pytest.mark.parametrize("model", MODELS)
def test_blocks_of_known_models_gain_what_was_predicted(model: str):
    rows = rows_of(layers_of(model))
    slow = sum(row["carrier_seconds"] for row in rows)
    fast = sum(row["float8_seconds"] for row in rows)
    milliseconds, speed_up = PUBLISHED[model]
    assert 1e3 * slow == pytest.approx(milliseconds, rel=0.01)
    assert slow / fast == pytest.approx(speed_up, abs=0.01)
    chosen = sum(
        row["float8_seconds" if row["float8"] == "float8" else "carrier_seconds"] for row in rows
    )
    assert chosen <= slow


@pytest.mark.parametrize(("m", "width"), [(512, 1856), (1024, 1600), (2048, 1152), (4096, 960)])
def test_the_time_on_the_gpu_breaks_even_where_it_was_predicted(m: int, width: int):
    widths = range(128, 4097, 64)
    rows = rows_of([Layer(m, k, k, bias=True) for k in widths])
    faster = [row["carrier_seconds"] > row["float8_seconds"] for row in rows]
    first = next(k for i, k in enumerate(widths) if all(faster[i : i + 3]))
    assert first == width


def test_layers_that_wait_for_the_host_never_run_in_fp8():
    for m in (1, 16, 197, 1024, 8192):
        for k in (16, 256, 768, 1024):
            for layer in (Layer(m, k, k), Layer(m, k, k, torch.float32, bias=True)):
                if 2 * m * k * k < 2e10:
                    row = row_of(layer, recipe=fastamp.Float8Recipe(min_gain=1.0))
                    assert row["float8"] == "gain below min_gain"


@settings(deadline=None, max_examples=100)
@given(LAYERS, st.sampled_from(["m", "k", "n"]), st.integers(1, 64))
def test_larger_products_take_longer(layer: Layer, name: str, more: int):
    larger = dataclasses.replace(layer, **{name: getattr(layer, name) + 16 * more})
    row, of_larger = rows_of([layer, larger])
    assert of_larger["carrier_seconds"] >= row["carrier_seconds"]
    assert of_larger["float8_seconds"] >= row["float8_seconds"]


@settings(deadline=None, max_examples=100)
@given(LAYERS)
def test_fp8_is_never_predicted_to_gain_more_than_its_rate_and_the_casts_it_saves(layer: Layer):
    # Without casts to 16 bits there is nothing to gain but the products' time: twice, at most.
    plain = dataclasses.replace(
        layer, x_dtype=torch.bfloat16, weight_dtype=torch.bfloat16, bias=False
    )
    assert row_of(plain)["gain"] < 2


@settings(deadline=None, max_examples=100)
@given(LAYERS, st.floats(0, 3), st.floats(0, 3))
def test_who_asks_for_less_gain_gets_no_fewer_products(layer: Layer, a: float, b: float):
    less, more = (
        row_of(layer, recipe=fastamp.Float8Recipe(min_gain=gain))["float8"]
        for gain in sorted((a, b))
    )
    assert less == "float8" or more != "float8"
    assert row_of(layer, recipe=fastamp.Float8Recipe(min_gain=0))["float8"] == "float8"


@pytest.mark.parametrize("bad", [-1, -1e-300, float("-inf"), float("nan")])
def test_an_impossible_min_gain_is_refused(bad: float):
    with pytest.raises(
        ValueError,
        match=r"Float8Recipe: expected min_gain of Float8Recipe to be at least 0, got (-|nan)",
    ):
        fastamp.Float8Recipe(min_gain=bad)


@pytest.mark.parametrize("bad", ["1.1", None, True, torch.tensor(1.1)])
def test_a_min_gain_that_is_no_number_is_refused(bad: Any):
    with pytest.raises(TypeError, match="Float8Recipe: expected min_gain to be a float, got"):
        fastamp.Float8Recipe(min_gain=bad)


def test_min_gain_is_part_of_the_recipe_in_force():
    recipe = fastamp.Float8Recipe(min_gain=2)
    assert recipe != fastamp.Float8Recipe()
    with float8_region(float8=recipe):
        assert fastamp.float8_recipe("cpu") == recipe
        with float8_region():
            assert fastamp.float8_recipe("cpu").min_gain == 1.1
        assert fastamp.float8_recipe("cpu") == recipe


def test_the_rule_is_not_asked_on_the_cpu():
    layer, x = nn.Linear(16, 16), torch.randn(1, 16)
    with float8_region(float8=fastamp.Float8Recipe(min_gain=float("inf"))):
        assert outcomes(lambda: layer(x)) == ["float8"]


@pytest.mark.usefixtures("pretended_gpu")
def test_products_that_gain_too_little_have_the_bits_of_the_carrier():
    layer, x = nn.Linear(32, 16), torch.randn(4, 32, requires_grad=True)

    def bits() -> list[torch.Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y.sum(), [x, *layer.parameters()])]

    with fastamp.autocast("cpu", dtype=torch.bfloat16):
        expected = bits()
    with float8_region():
        assert outcomes(lambda: layer(x)) == ["gain below min_gain"]
        assert all(map(torch.equal, bits(), expected))
    with float8_region(float8=fastamp.Float8Recipe(min_gain=0)):
        assert outcomes(lambda: layer(x)) == ["float8"]
        assert not torch.equal(bits()[0], expected[0])


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_recompute_what_the_forward_pass_decided(use_reentrant: bool):
    # The gain of training lies between that of y alone and 1: each alone would decide otherwise.
    first, second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    trained, alone = (
        row_of(Layer(4, 32, 32, torch.float32, dx=grads, dw=grads))["gain"]
        for grads in (True, False)
    )
    assert alone < trained
    recipe = fastamp.Float8Recipe(min_gain=(alone + trained) / 2)

    def body(x: torch.Tensor) -> torch.Tensor:
        return second(first(x).float())

    x = torch.randn(4, 32, requires_grad=True)
    with float8_region(float8=recipe):
        plain = torch.autograd.grad(body(x).float().square().sum(), [x, first.weight])

    def run() -> tuple[torch.Tensor, ...]:
        with float8_region(float8=recipe):
            y = checkpoint(body, x, use_reentrant=use_reentrant)
        y.float().square().sum().backward()
        return x.grad, first.weight.grad

    with fastamp.trace() as trace:
        found = run()
    assert {row.float8 for row in trace.rows if row.op == "linear"} == {"float8"}
    assert all(map(torch.equal, found, plain))


@pytest.mark.usefixtures("pretended_gpu")
def test_frozen_weights_and_inference_are_decided_by_the_output_alone():
    x, layer = torch.randn(4, 32), nn.Linear(32, 32, bias=False)
    trained, alone = (
        row_of(Layer(4, 32, 32, torch.float32, dx=grads, dw=grads))["gain"]
        for grads in (True, False)
    )
    with float8_region(float8=fastamp.Float8Recipe(min_gain=(alone + trained) / 2)):
        assert outcomes(lambda: layer(x)) == ["float8"]
        with torch.inference_mode():
            assert outcomes(lambda: layer(x)) == ["gain below min_gain"]
        layer.weight.requires_grad_(False)
        assert outcomes(lambda: layer(x)) == ["gain below min_gain"]
