# SPDX-License-Identifier: Apache-2.0
"""DataParallel's replicas run under the policies and the fp8 recipe of the thread that calls them.

torch's own functions run here, with two pretended devices that are the CPU.
"""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.parallel
from torch import nn

import fastamp
from support.float8 import E4M3, float8_region

BF16, FP16 = torch.bfloat16, torch.float16
RECIPE = fastamp.float8.Recipe(grad_dtype=E4M3)


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copies(torch.autograd.Function):
        """What Broadcast does: copies for each device, whose gradients are summed."""

        @staticmethod
        def forward(_ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(tensor.clone() for _ in range(count) for tensor in tensors)

        @staticmethod
        def backward(_ctx: Any, *grads: torch.Tensor) -> Any:
            half = len(grads) // 2
            return None, *(a + b for a, b in zip(grads[:half], grads[half:], strict=True))

    def copies(tensors: Any, devices: Any, _detach: Any = False, **_: Any) -> list[Any]:
        flat = Copies.apply(len(devices), *tensors) if tensors else ()
        size = len(tensors)
        return [list(flat[i * size : (i + 1) * size]) for i in range(len(devices))]

    replicate = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", copies)
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(accelerator, "current_stream", lambda _=None: nullcontext())
    monkeypatch.setattr(accelerator, "device_index", lambda _: nullcontext())


class Seen(nn.Module):
    """Notes what its forward pass runs under."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 32), nn.Linear(32, 16)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.first(x))
        recipe = fastamp.float8.recipe("cpu")
        self.seen.append((threading.current_thread(), recipe, torch.get_autocast_dtype("cpu")))
        return y


def data_parallel(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What DataParallel.forward does, looking torch's functions up where it does."""
    module = sys.modules["torch.nn.parallel.data_parallel"]
    replicas = module.replicate(model, [0, 1])
    return torch.cat(module.parallel_apply(replicas, list(x.chunk(2)), None, [0, 1]))


def test_replicas_run_under_the_recipe_and_its_base_dtype():
    torch.manual_seed(0)
    model, x = Seen(), torch.randn(8, 32)
    for base_dtype in (BF16, FP16):
        with float8_region(float8=RECIPE, dtype=base_dtype), fastamp.debug.trace() as trace:
            parts = [model(part) for part in x.chunk(2)]
            expected = torch.cat(parts)
            model.seen.clear()
            found = data_parallel(model, x)
        assert torch.equal(found, expected)
        threads = {thread for thread, _, _ in model.seen}
        assert len(threads) == 2
        assert threading.current_thread() not in threads
        assert [entry[1:] for entry in model.seen] == [(RECIPE, base_dtype)] * 2
        assert {row.float8 for row in trace.rows if row.op.startswith("linear")} == {"float8"}
        model.zero_grad()
        found.sum().backward()
        found_gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        expected.sum().backward()
        for a, b in zip(found_gradients, model.parameters(), strict=True):
            assert torch.equal(a, b.grad)


def test_excluded_weights_are_excluded_in_replicas():
    model, x = Seen(), torch.randn(8, 32)
    with fastamp.float8.exclude(model.head), float8_region(), fastamp.debug.trace() as trace:
        data_parallel(model, x)
    assert {row.float8 for row in trace.rows if row.op.startswith("linear")} == {
        "excluded",
        "float8",
    }


def test_replicas_run_under_the_policies_of_a_block():
    model, x = Seen(), torch.randn(8, 32)
    with float8_region(), fastamp.policies.override({"linear": "fp32"}):
        assert data_parallel(model, x).dtype == torch.float32
    with float8_region():
        assert data_parallel(model, x).dtype == BF16


def test_without_a_recipe_torchs_functions_are_its_own_and_do_what_they_do():
    modules = [torch.nn.parallel, sys.modules["torch.nn.parallel.data_parallel"]]
    before = [(m.parallel_apply, m.replicate) for m in modules]
    model, x = Seen(), torch.randn(8, 32)
    with float8_region():
        assert [(m.parallel_apply, m.replicate) for m in modules] != before
        with fastamp.autocast("cpu", dtype=BF16):
            model.seen.clear()
            data_parallel(model, x)
            assert [recipe for _, recipe, _ in model.seen] == [None, None]
    assert [(m.parallel_apply, m.replicate) for m in modules] == before
    with fastamp.autocast("cpu", dtype=BF16):
        assert [(m.parallel_apply, m.replicate) for m in modules] == before


def test_an_error_in_a_replica_leaves_nothing_behind():
    class Fails(nn.Module):
        def forward(self, _: torch.Tensor) -> torch.Tensor:
            raise KeyError("inside")

    with float8_region(), pytest.raises(KeyError, match="inside"):
        data_parallel(Fails(), torch.randn(8, 32))
    assert fastamp.float8.recipe("cpu") is None
