# SPDX-License-Identifier: Apache-2.0
"""Ops on a device that is not current and on a stream of its own, with lists of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastamp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
HERE, THERE = "cuda:0", "cuda:1"


@pytest.fixture(params=["default stream", "own stream"])
def stream(request: pytest.FixtureRequest) -> Any:
    """Current on the second device, while the first device is current."""
    of_device = torch.cuda.current_stream(THERE)
    stream = of_device
    if request.param == "own stream":
        stream = torch.cuda.Stream(THERE)
        stream.wait_stream(of_device)
    with torch.cuda.stream(stream), torch.cuda.device(HERE):
        yield stream


# Tables in 4 KiB of arguments, in 32 KiB, in device memory: filled from pinned memory.
LENGTHS = (3, 300, 6000)


@pytest.mark.parametrize("length", LENGTHS)
def test_unscaling_reads_what_is_before_it_on_its_stream(length, stream):
    factor = torch.full((), 0.5).pin_memory()
    grads = torch.arange(3.0 * length, device=THERE).split(3)
    inverse, found = torch.empty((), device=THERE), torch.zeros((), device=THERE)
    inverse.copy_(factor, non_blocking=True)
    torch.ops.fastamp.unscale_and_check_(grads, inverse, found)
    # Whatever is pinned next must not be what the table is still read from.
    others = [torch.full((4096,), 7.0).pin_memory() for _ in range(4)]
    result = torch.empty(3 * length).pin_memory()
    result.copy_(torch.cat(grads), non_blocking=True)
    stream.synchronize()
    assert torch.equal(result, torch.arange(3.0 * length) / 2)
    assert found.item() == 0
    assert len(others) == 4


@pytest.mark.parametrize("length", LENGTHS)
def test_norms_and_flags(length, stream):
    whole = torch.ones(3 * length, device=THERE)
    whole[-1] = torch.inf
    grads, one = whole.split(3), torch.ones((), device=THERE)
    for last, flag in ((torch.inf, 1.0), (1.0, 0.0)):
        whole[-1] = last
        found = torch.zeros((), device=THERE)
        norm = torch.zeros((), dtype=torch.float64, device=THERE)
        counts = torch.zeros(length, 2, dtype=torch.int64, device=THERE)
        torch.ops.fastamp.norm_and_check_(grads, one, found, norm, non_finite_counts=counts)
        stream.synchronize()
        assert found.item() == flag
        assert counts.sum().item() == flag
        if not flag:
            assert norm.item() == 3 * length


def test_exponents_are_counted(stream):
    grads = [torch.full((5,), 2.0**i, device=THERE) for i in range(-3, 3)]
    table = torch.zeros(len(grads), 260, dtype=torch.int64, device=THERE)
    on_cpu = torch.zeros(len(grads), 260, dtype=torch.int64)
    torch.ops.fastamp.count_exponents_(grads, table)
    torch.ops.fastamp.count_exponents_([grad.cpu() for grad in grads], on_cpu)
    stream.synchronize()
    assert torch.equal(table.cpu(), on_cpu)
    assert on_cpu.sum().item() > 0


def small_model(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64, bias=False),
        torch.nn.GELU(),
        torch.nn.Linear(64, 32, bias=False),
    )
    return model.to(device)


@pytest.mark.usefixtures("stream")
def test_weights_are_cast_together():
    model, x = small_model(THERE), torch.ones(2, 32, device=THERE)

    def output() -> torch.Tensor:
        with fastamp.autocast("cuda", dtype=torch.bfloat16):
            return model(x)

    one_by_one = output()
    with fastamp.casts.together(model):
        for _ in range(2):  # From the second region on it is known which ones.
            assert torch.equal(output(), one_by_one)


FLOAT8 = torch.float8_e4m3fn
OPTIMIZERS = {
    "Muon": lambda p: fastamp.optim.Muon(p, lr=0.02),
    "Muon with weight copies": lambda p: fastamp.optim.Muon(
        p, lr=0.02, autocast_dtype=torch.bfloat16
    ),
    "AdamW with weight copies": lambda p: fastamp.optim.AdamW(
        p, lr=0.02, autocast_dtype=torch.bfloat16
    ),
    "AdamW with fp8 copies": lambda p: fastamp.optim.AdamW(p, lr=0.02, autocast_dtype=FLOAT8),
    "AdamW, 8-bit moments": lambda p: fastamp.optim.AdamW(p, lr=0.02, state_dtype="8bit"),
    "Adam, bf16 moments": lambda p: fastamp.optim.Adam(p, lr=0.02, state_dtype=torch.bfloat16),
}


def train(optimizer: str, device: str) -> list[torch.Tensor]:
    model = small_model(device)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    scaler = fastamp.GradScaler("cuda", init_scale=64.0)
    generator = torch.Generator().manual_seed(1)
    float8 = fastamp.float8.Recipe(small_size=(0, 0)) if "fp8" in optimizer else False
    for step in range(4):
        stepper.zero_grad()
        x = torch.randn(16, 32, generator=generator).to(device)
        with fastamp.autocast("cuda", dtype=torch.bfloat16, float8=float8):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        if step == 2:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(stepper)
        scaler.update()
    torch.cuda.synchronize(device)
    assert scaler.get_scale() == 32.0
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_have_the_bits_of_the_current_device(optimizer, stream):
    here, there = train(optimizer, HERE), train(optimizer, THERE)
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b)
    assert stream is not None
