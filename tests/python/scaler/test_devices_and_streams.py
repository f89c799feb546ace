# SPDX-License-Identifier: Apache-2.0
"""Training on devices that are not current, on several, on streams that are not the default's."""

from __future__ import annotations

import copy
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import fastamp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

OPTIMIZERS = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "AdamW": {"lr": 0.05},
}


@dataclass(frozen=True)
class Place:
    """Where a run happens; the default is device 0, current, on its default stream."""

    device: str = "cuda:0"
    second: str = ""  # of the model's second half; "": the same
    current: int = 0
    own_stream: bool = False
    side_forward: bool = False  # on another stream, so that autograd runs backward there


PLACES = {
    "not current": Place("cuda:1"),
    "current": Place("cuda:1", current=1),
    "own stream": Place(own_stream=True),
    "own stream, not current": Place("cuda:1", own_stream=True),
    "forward on a side stream": Place(side_forward=True),
    "all streams differ, not current": Place("cuda:1", own_stream=True, side_forward=True),
    "two devices": Place(second="cuda:1"),
    "two devices, the second current": Place(second="cuda:1", current=1),
    "two devices, own stream": Place(second="cuda:1", own_stream=True),
}


class Halves(torch.nn.Module):
    def __init__(self, place: Place) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 4)
        generator = torch.Generator().manual_seed(0)  # threads share the default one
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        self.first.to(place.device)
        self.second.to(place.second or place.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        return self.second(hidden.to(self.second.weight.device))


@dataclass
class Library:
    scaler: Any
    autocast: Any
    optimizers: Any


TORCH = Library(torch.amp.GradScaler, torch.autocast, torch.optim)
FASTAMP = Library(fastamp.GradScaler, fastamp.autocast, torch.optim)
FUSED = Library(fastamp.GradScaler, fastamp.autocast, fastamp.optim)


def loss_of(model: Halves, library: Library, x: torch.Tensor, y: torch.Tensor) -> Any:
    with library.autocast("cuda", dtype=torch.float16):
        output = model(x)
    return (output.float() - y).square().mean()


def train(library: Library, optimizer_name: str, place: Place, *, clip: bool, inf_in: str) -> Any:
    """Parameters, what the scaler says, and norms of 6 steps, of which the third overflows."""
    model = Halves(place)
    kind = getattr(library.optimizers, optimizer_name)
    optimizer = kind(model.parameters(), **OPTIMIZERS[optimizer_name])
    scaler = library.scaler("cuda", init_scale=128.0, growth_interval=2)
    generator = torch.Generator().manual_seed(1)
    norms, scales = [], []
    with ExitStack() as stack:
        if place.own_stream:
            for device in {place.device, place.second or place.device}:
                stream = torch.cuda.Stream(device)
                stream.wait_stream(torch.cuda.current_stream(device))
                stack.enter_context(torch.cuda.stream(stream))
        stack.enter_context(torch.cuda.device(place.current))
        main, side = torch.cuda.current_stream(place.device), torch.cuda.Stream(place.device)
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(5, 8, generator=generator).to(place.device)
            y = torch.randn(5, 4, generator=generator).to(place.second or place.device)
            if place.side_forward:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    loss = loss_of(model, library, x, y)
                main.wait_stream(side)
            else:
                loss = loss_of(model, library, x, y)
            scaler.scale(loss).backward()
            if step == 2:
                getattr(model, inf_in).weight.grad[0, 0] = torch.inf
            if clip:
                scaler.unscale_(optimizer)
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        for device in range(2):
            torch.cuda.synchronize(device)
    return [p.detach().cpu() for p in model.parameters()], scales, [n.item() for n in norms]


def assert_same(own: Any, torchs: Any) -> None:
    for a, b in zip(own[0], torchs[0], strict=True):
        assert torch.equal(a, b)
    assert own[1] == torchs[1]
    assert own[2] == pytest.approx(torchs[2], rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
def test_steps_of_torchs_optimizers_are_torchs(place, optimizer, clip):
    for inf_in in ("first", "second"):
        options: dict[str, Any] = {"clip": clip, "inf_in": inf_in}
        torchs = train(TORCH, optimizer, PLACES[place], **options)
        assert torchs[1][2] < torchs[1][1]  # skipped
        assert_same(train(FASTAMP, optimizer, PLACES[place], **options), torchs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
def test_fused_steps_are_those_of_one_device_on_its_default_stream(place, optimizer):
    for inf_in in ("first", "second"):
        options: dict[str, Any] = {"clip": False, "inf_in": inf_in}
        at_home = train(FUSED, optimizer, Place(), **options)
        assert at_home[1][2] < at_home[1][1]
        assert_same(train(FUSED, optimizer, PLACES[place], **options), at_home)


def test_threads_train_on_devices_and_streams_of_their_own():
    places = [Place(f"cuda:{i % 2}", current=i % 2, own_stream=i > 1) for i in range(4)]
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        results[number] = train(FUSED, "AdamW", places[number], clip=True, inf_in="first")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(places)
    for i in range(1, len(places)):
        assert_same(results[i], results[0])


def test_the_norm_of_gradients_on_two_devices():
    model = Halves(Place(second="cuda:1"))
    optimizer = fastamp.optim.SGD(model.parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cuda", init_scale=64.0)
    scaler.scale(model(torch.ones(5, 8, device="cuda:0")).square().mean()).backward()
    on_cpu = [p.grad.cpu().double() / 64 for p in model.parameters()]
    expected = torch.nn.utils.get_total_norm(on_cpu).item()
    limit = expected / 2
    norm = scaler.clip_grad_norm_(optimizer, limit)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    before = copy.deepcopy([p.detach().cpu() for p in model.parameters()])
    scaler.step(optimizer)
    scaler.update()
    for was, parameter, gradient in zip(before, model.parameters(), on_cpu, strict=True):
        stepped = was.double() - 0.1 * gradient * limit / (expected + 1e-6)
        torch.testing.assert_close(parameter.detach().cpu().double(), stepped, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.SGD, fastamp.optim.SGD])
def test_an_overflow_on_another_rank_skips_what_is_on_either_device(kind, monkeypatch):
    other_ranks = iter((1.0, 0.0))

    def all_reduce(flag: torch.Tensor, *_: Any, **__: Any) -> None:
        flag.clamp_(min=next(other_ranks))

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = Halves(Place(second="cuda:1"))
        optimizer = kind(model.parameters(), lr=0.1)
        scaler = fastamp.GradScaler("cuda", process_group=torch.distributed.group.WORLD)
        before = copy.deepcopy([p.detach().cpu() for p in model.parameters()])
        for moves in (False, True):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(5, 8, device="cuda:0")).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.step_was_skipped is not moves
            after = [p.detach().cpu() for p in model.parameters()]
            same = [torch.equal(p, q) for p, q in zip(before, after, strict=True)]
            assert same == [not moves] * len(same)
    finally:
        torch.distributed.destroy_process_group()


def test_zeros_are_counted_on_both_devices():
    model = Halves(Place(second="cuda:1"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cuda", init_scale=2.0)
    scaler.scale(torch.ones((), device="cuda:0"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.first.bias.grad.zero_()
    model.second.bias.grad[1:] = 0.0
    scaler.step(optimizer)
    scaler.update()
    report = scaler.underflow_report(model.named_parameters())
    assert report is not None
    zeros = {gradient.name: gradient.zeros for gradient in report.gradients}
    assert zeros == {"first.bias": 16, "second.bias": 3}
    assert report.elements == sum(p.numel() for p in model.parameters())


def test_a_scale_that_a_program_writes_is_the_one_of_the_next_step():
    parameter = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = fastamp.optim.SGD([parameter], lr=1.0)
    scaler = fastamp.GradScaler("cuda", init_scale=2.0)
    for factor in (1.0, 8.0, 4.0):
        if scaler._scale is not None:
            scaler._scale.mul_(factor)
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert parameter.tolist() == [-2.0] * 4
    assert scaler.get_scale() == 64.0
