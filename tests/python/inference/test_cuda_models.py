# SPDX-License-Identifier: Apache-2.0
"""Conversion and export of models on CUDA devices, current or not."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import fastamp
from support.inference_models import NAMES, model_and_input, tensors

pytestmark = pytest.mark.cuda
FP16, BF16, FLOAT8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(params=["cuda:0", "cuda:1"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device; the first is current."""
    if int(request.param[-1]) >= torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    with torch.cuda.device(0):
        yield request.param


def moved(value: Any, device: str) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, value)


def run(model: Any, x: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return tensors(model(x))


def on(device: str, name: str) -> tuple[Any, Any]:
    model, x = model_and_input(name)
    return model.to(device), moved(x, device)


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.device) == (b.dtype, b.device)
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_converted_model_computes_what_its_region_computes(name, dtype, device):
    model, x = on(device, name)
    with fastamp.autocast("cuda", dtype=dtype):
        wanted = run(model, x)
    converted = fastamp.inference.convert(model, dtype, example_inputs=x, verbose=False)
    assert {str(p.device) for p in converted.parameters()} == {device}
    assert_equal(run(converted, x), wanted)


def test_a_converted_model_moves_to_another_device(device):
    model, x = on(device, NAMES[0])
    converted = fastamp.inference.convert(model, FP16, example_inputs=x, verbose=False)
    wanted = [t.cpu() for t in run(converted, x)]
    file = io.BytesIO()
    torch.save(converted, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cuda:0", weights_only=False)
    assert_equal([t.cpu() for t in run(loaded, moved(x, "cuda:0"))], wanted)
    assert_equal([t.cpu() for t in run(converted.to("cuda:0"), moved(x, "cuda:0"))], wanted)


def test_an_exported_program_computes_what_the_region_computes(device):
    model, x = on(device, NAMES[0])
    with fastamp.autocast("cuda", dtype=FP16):
        wanted = [t.float() for t in run(model, x)]  # as programs give results by default
    exported = fastamp.inference.export(model, (x,), FP16, verbose=False)
    assert_equal(run(exported.program.module(), x), wanted)


def test_weights_in_fp8(device):
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    model.to(device)
    x = torch.randn(16, 32, device=device)
    exact = run(model, x)[0]
    converted = fastamp.inference.convert(model, FLOAT8, example_inputs=x, verbose=False)
    (found,) = run(converted, x)
    assert str(found.device) == device
    torch.testing.assert_close(found.float(), exact, rtol=0.1, atol=0.1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_two_devices_is_refused():
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4, device="cuda:0"), torch.nn.Linear(4, 4, device="cuda:1")
    )
    with pytest.raises(ValueError, match=r"expected a model on one device, got .* cuda:0, cuda:1"):
        fastamp.inference.convert(model, FP16, verbose=False)
