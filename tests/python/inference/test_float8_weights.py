# SPDX-License-Identifier: Apache-2.0
"""convert(dtype=torch.float8_e4m3fn): a byte for each weight, and the fp8 region's bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
from benchmarks import models
from support.inference_models import tensors

FP8 = torch.float8_e4m3fn


def in_fp8(model: nn.Module, *args: Any) -> list[torch.Tensor]:
    with torch.no_grad(), fastamp.autocast("cpu", float8=True):
        return tensors(model(*args))


class Mixed(nn.Module):
    """Layers in fp8, too small ones, a convolution, products by other ops, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.up, self.down, self.small = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 7)
        self.matrix = nn.Parameter(torch.randn(32, 32))
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.conv(self.words(tokens).mT).mT
        x = self.norm(x + self.down(torch.relu(self.up(x)))) @ self.matrix
        return self.small(x), nn.functional.linear(x, self.words.weight)


def test_outputs_are_those_of_the_region_bit_for_bit():
    torch.manual_seed(0)
    model, tokens = Mixed().eval(), torch.randint(32, (2, 16))
    wanted = in_fp8(model, tokens)
    for example in (tokens, None):
        for inplace in (False, True):
            given = copy.deepcopy(model) if inplace else model
            converted = fastamp.inference.convert(
                given, FP8, example_inputs=example, inplace=inplace, verbose=False
            )
            with torch.no_grad(), fastamp.debug.trace() as trace:
                found = tensors(converted(tokens))
            assert [t.dtype for t in found] == [t.dtype for t in wanted]
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
            in_float8 = sum(row.calls for row in trace.rows if row.float8 == "float8")
            assert in_float8 == 4  # up, down, the matrix and the tied head
    rows = {row.name: row for row in converted.fastamp_conversion.parameters}
    assert rows["up.weight"].dtype == rows["down.weight"].dtype == "float8_e4m3fn"
    assert rows["up.weight"].bytes_after == 32 * 64
    assert rows["conv.weight"].dtype == rows["small.weight"].dtype == "bfloat16"
    assert {rows[name].dtype for name in ("words.weight", "matrix", "up.bias")} == {"float32"}
    stored = converted.up.parametrizations.weight.original
    assert (
        stored.dtype == converted.state_dict()["up.parametrizations.weight.original"].dtype == FP8
    )


@pytest.mark.parametrize("largest", [1.0, 224.0, 225.0, 231.0, 448.0, 449.0, 1e-30, 3e38, 0.0])
def test_any_range_of_a_weight(largest: float):
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight.mul_(0.9 * largest / layer.weight.abs().max())
        layer.weight[0, 0] = largest
    x = torch.randn(4, 16)
    wanted = in_fp8(layer, x)
    converted = fastamp.inference.convert(layer, FP8, verbose=False)
    assert converted.fastamp_conversion.converted[0] == "weight"
    with torch.no_grad():
        torch.testing.assert_close(converted(x), wanted[0], rtol=0, atol=0, equal_nan=True)


def test_excluded_layers_and_shared_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)).eval()
    model[1].weight = model[0].weight
    x = torch.randn(4, 16)
    with fastamp.float8.exclude(model[2]):
        wanted = in_fp8(model, x)
        converted = fastamp.inference.convert(model, FP8, example_inputs=x, verbose=False)
        first, second = (converted[i].parametrizations.weight.original for i in (0, 1))
        assert first is second
        assert not hasattr(converted[2], "parametrizations")
        with torch.no_grad():
            assert torch.equal(converted(x), wanted[0])


def test_a_language_model():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    model = models.bert(num_hidden_layers=2, vocab_size=128, max_position_embeddings=32, **sizes)
    tokens = torch.randint(128, (2, 16))
    wanted = in_fp8(model.eval(), tokens)
    converted = fastamp.inference.convert(model, FP8, example_inputs=tokens, verbose=False)
    with torch.no_grad():
        found = tensors(converted(tokens))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    done = converted.fastamp_conversion
    assert sum(row.dtype == "float8_e4m3fn" for row in done.parameters) >= 13
