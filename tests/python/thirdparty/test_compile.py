# SPDX-License-Identifier: Apache-2.0
"""torch.compile of training steps while fastamp is installed: no recompilation, torch's bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import fastamp
from support.simulated_cuda import need_real_gpu
from support.twin_runs import is_fastamps, parameters_of, same_results

BF16, FP16 = torch.bfloat16, torch.float16
INDUCTOR = pytest.param(BF16, "inductor", marks=pytest.mark.slow)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch
CASES = [(BF16, "eager"), (FP16, "eager"), (BF16, "aot_eager"), (FP16, "aot_eager"), INDUCTOR]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, inside: torch.dtype | None, device: str) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.inside, self.device = inside, device

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(nn.functional.gelu(self.first(x))) + x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside is None:
            return self.body(x)
        with torch.autocast(self.device, dtype=self.inside):
            return self.body(x)


def steps(model: Any, device: str, region: Any, count: int = 6) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2)
    assert is_fastamps(scaler)
    x, trace = torch.randn(4, 8, device=device), []
    for step in range(count):
        optimizer.zero_grad()
        with region():
            loss = model(x).float().square().mean()
        scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.state_dict()))
    return trace, parameters_of(model)


@pytest.mark.parametrize(("dtype", "backend"), CASES)
@pytest.mark.parametrize("where", ["inside", "around"])
def test_training_compiles_once_and_gives_torchs_bits(
    device: str, where: str, dtype: torch.dtype, backend: str
):
    if backend == "inductor" and device == "cuda":
        need_real_gpu("Triton")

    def region() -> Any:
        return torch.autocast(device, dtype=dtype, enabled=where == "around")

    def run() -> Any:
        torch._dynamo.reset()
        model = Block(dtype if where == "inside" else None, device).to(device)
        model.compile(backend=backend, fullgraph=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            return steps(model, device, region)

    trace, _ = same_results(run, witness=False)
    assert trace[3][1]["scale"] == trace[2][1]["scale"] / 2


def test_compiled_before_install_needs_no_recompilation_after_it(device: str):
    model = Block(BF16, device).to(device)
    model.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 8, device=device)
    before = model(x)
    with torch._dynamo.config.patch(error_on_recompile=True), fastamp.install():
        assert torch.equal(model(x), before)
    assert torch.equal(model(x), before)
