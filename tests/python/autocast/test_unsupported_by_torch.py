# SPDX-License-Identifier: Apache-2.0
"""What torch's regions fail at on the CPU, and fastamp's run; docs/compatibility.md."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
from support.autocast_state import torch_kernels
from support.children import check_python

DTYPES = [torch.bfloat16, torch.float16]
pytestmark = pytest.mark.filterwarnings("ignore:.*nested.tensor:UserWarning")

# -- LSTMs without oneDNN's primitive: a CPU without AVX-512, as oneDNN can be made to see
#    for, once per process.

_LSTM = """
import sys
import torch
from torch import nn
import fastamp

for options in (
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.0},
    {"bias": False},
):
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        lstm = nn.LSTM(8, 16, **options)
        x = torch.randn(5, 3, 8, requires_grad=True)
        inputs = [x, *lstm.parameters()]
        wide, (wide_h, wide_c) = lstm(x)
        wide_grads = torch.autograd.grad(wide.square().sum(), inputs)
        for region in (fastamp.autocast, torch.autocast):
            with region("cpu", dtype=dtype):
                out, (h, c) = lstm(x)
                with torch.no_grad():
                    quiet, _ = lstm(x)
                with torch.inference_mode():
                    assert torch.equal(lstm(x)[0], out)
            assert out.dtype == h.dtype == c.dtype == dtype, (out.dtype, h.dtype, c.dtype)
            assert torch.equal(quiet, out)
            for own, reference in ((out, wide), (h, wide_h), (c, wide_c)):
                assert own.shape == reference.shape
                torch.testing.assert_close(own.float(), reference, atol=0.02, rtol=0.02)
            grads = torch.autograd.grad(out.float().square().sum(), inputs)
            for own, reference in zip(grads, wide_grads):
                assert own.dtype == torch.float32
                error = (own - reference).norm() / reference.norm()
                assert error < 0.02, error
print("ran")
"""


def test_an_lstm_runs_on_a_cpu_without_the_primitive():
    assert check_python("-W", "ignore", "-c", _LSTM, ONEDNN_MAX_CPU_ISA="AVX2") == "ran\n"


def test_the_computation_without_the_primitive_is_that_of_the_primitive():
    """On this CPU, whichever it has."""
    assert check_python("-W", "ignore", "-c", _LSTM) == "ran\n"


# -- torch.nn.TransformerEncoder makes padded inputs nested, and its layer's inner ops take no two
#    dtypes.


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2).eval()


PADDING = torch.tensor([[False] * 3 + [True] * 2, [False] * 4 + [True]])


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("region", [fastamp.autocast, torch.autocast])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_encoder_in_evaluation_takes_a_padding_mask(
    dtype: torch.dtype, region: Any, mode: Any, options: dict[str, Any]
):
    model, x = encoder(**options), torch.randn(2, 5, 16)
    with mode():
        expected = model(x, src_key_padding_mask=PADDING)
        for _ in range(2):
            with region("cpu", dtype=dtype):
                found = model(x, src_key_padding_mask=PADDING)
                dense = model(x)
            assert found.dtype == dense.dtype == dtype
            assert not model.use_nested_tensor or not found[PADDING].any()
            torch.testing.assert_close(
                found[~PADDING].float(), expected[~PADDING], atol=0.1, rtol=0.05
            )
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_encoder_without_padding_has_torchs_bits(dtype: torch.dtype):
    model, x = encoder(), torch.randn(2, 5, 16)
    outs = []
    for kernels in (torch_kernels(), nullcontext()):
        with kernels, torch.no_grad(), torch.autocast("cpu", dtype=dtype):
            outs.append(model(x))
    assert torch.equal(*outs)


def test_a_nested_layer_of_16_bits_is_left_alone():
    model, x = encoder().bfloat16(), torch.randn(2, 5, 16).bfloat16()
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=PADDING)
        with fastamp.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model(x, src_key_padding_mask=PADDING), expected)
