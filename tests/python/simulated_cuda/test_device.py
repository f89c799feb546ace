# SPDX-License-Identifier: Apache-2.0
"""The runtime of the simulated device: memory, streams, capture, counters, late work."""

from __future__ import annotations

import threading

import pytest
import torch

import fastamp
from support.simulated_cuda import allocations_fail, counted, late_work

pytestmark = pytest.mark.simulated


def test_copies_and_waits_are_counted():
    host = torch.arange(6.0)
    with counted("copies_to_device", "waits", "launches") as to_device:
        x = host.cuda()
    assert to_device["copies_to_device"] == 1
    assert to_device["launches"] == 0
    with counted("copies_to_host", "waits") as to_host:
        assert x.sum().item() == 15
    assert to_host["copies_to_host"] == 1
    assert to_host["waits"] >= 1
    with counted("copies_to_device", "copies_to_host", "waits", "operators") as none:
        y = x * 2 + 1
    assert none["operators"] == 2
    assert none["waits"] == none["copies_to_device"] == none["copies_to_host"] == 0
    assert y.tolist() == [1, 3, 5, 7, 9, 11]


def test_ten_thousand_tensors_are_one_launch_and_no_wait():
    grads = [torch.full((3,), float(i), device="cuda") for i in range(10_000)]
    inverse, found = torch.full((), 0.5, device="cuda"), torch.zeros((), device="cuda")
    with counted("launches", "waits") as counts:
        torch.ops.fastamp.unscale_and_check_(grads, inverse, found)
    assert counts["launches"] == 1
    assert counts["waits"] == 0
    assert all(grad[0].item() == 0.5 * i for i, grad in enumerate(grads[:50]))


def test_a_training_step_waits_for_nothing_but_the_flag_of_the_one_before():
    model = torch.nn.Linear(8, 4, device="cuda")
    optimizer = fastamp.optim.AdamW(model.parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cuda", init_scale=8.0)
    x = torch.randn(4, 8, device="cuda")

    def step():
        optimizer.zero_grad()
        with fastamp.autocast("cuda", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        step()
    names = ("launches", "copies_to_device", "waits", "cudaEventSynchronize")
    with counted(*names) as counts:
        step()
    assert counts["copies_to_device"] == 0
    assert counts["launches"] == 3  # a check of the gradients, the step, the scale
    # Of the step before, whose flag the scaler reads now.
    assert counts["waits"] == counts["cudaEventSynchronize"] == 1


@pytest.mark.parametrize("first", [1, 2])
def test_allocations_fail_from_the_nth_on(first):
    torch.cuda.empty_cache()
    with allocations_fail(first):
        kept = [torch.empty(64 << 20, device="cuda") for _ in range(first - 1)]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(64 << 20, device="cuda")
    assert len(kept) == first - 1
    assert torch.empty(64 << 20, device="cuda").numel() == 64 << 20


def test_fresh_memory_is_rubbish():
    torch.cuda.empty_cache()
    big = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    assert set(big[:100].tolist()) == {0xCD}


def test_late_kernels_run_when_something_waits():
    x = torch.ones(5, device="cuda")
    pinned = torch.zeros(5).pin_memory()
    with late_work():
        pinned.copy_(x, non_blocking=True)
        assert pinned.tolist() == [0] * 5
        torch.cuda.synchronize()
        assert pinned.tolist() == [1] * 5


def test_pinned_memory_that_changes_before_a_late_copy_is_seen_changed():
    pinned = torch.ones(5).pin_memory()
    with late_work():
        x = torch.empty(5, device="cuda")
        x.copy_(pinned, non_blocking=True)
        pinned.fill_(7)
        torch.cuda.synchronize()
    assert x.tolist() == [7] * 5


def test_pageable_memory_is_read_at_once():
    pageable = torch.ones(5)
    with late_work():
        x = torch.empty(5, device="cuda")
        x.copy_(pageable, non_blocking=True)
        pageable.fill_(7)
    assert x.tolist() == [1] * 5


def test_streams_are_ordered_by_events_alone():
    side = torch.cuda.Stream()
    pinned = torch.ones(5).pin_memory()
    result = torch.zeros(5).pin_memory()
    with late_work():
        x = torch.empty(5, device="cuda")
        with torch.cuda.stream(side):
            x.copy_(pinned, non_blocking=True)
            event = side.record_event()
        torch.cuda.current_stream().wait_event(event)
        result.copy_(x, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        assert result.tolist() == [1] * 5
        with torch.cuda.stream(side):
            x.zero_()
        assert event.query()


def test_a_launch_on_a_stream_of_another_device_is_refused():
    import ctypes

    runtime = ctypes.CDLL(None)
    event = ctypes.c_void_p()
    assert runtime.cudaSetDevice(1) == 0
    assert runtime.cudaEventCreate(ctypes.byref(event)) == 0
    assert runtime.cudaSetDevice(0) == 0
    assert runtime.cudaEventRecord(event, None) == 400  # cudaErrorInvalidResourceHandle
    assert runtime.cudaGetLastError() == 400
    assert runtime.cudaEventDestroy(event) == 0
    assert runtime.cudaEventDestroy(event) == 400
    assert runtime.cudaGetLastError() == 400


def capture(body, **options):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        body()
    return graph


def test_a_capture_changes_nothing_and_a_replay_does():
    x = torch.zeros(3, device="cuda")
    graph = capture(lambda: x.add_(1))
    assert x.tolist() == [0] * 3
    graph.replay()
    graph.replay()
    assert x.tolist() == [2] * 3


REFUSED = {
    "a value is read": lambda x: x.sum().item(),
    "a stream is waited for": lambda _: torch.cuda.current_stream().synchronize(),
    "the device is waited for": lambda _: torch.cuda.synchronize(),
    "a copy to pageable memory": lambda x: x.cpu(),
    "a shape depends on values": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_capture_refuses(case):
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match=r"captur"):
        capture(lambda: REFUSED[case](x))
    assert x.sum().item() == 3


def test_an_unjoined_stream_makes_a_capture_fail():
    x = torch.ones(3, device="cuda")
    side = torch.cuda.Stream()

    def fork():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    with pytest.raises(RuntimeError, match="unjoined work"):
        capture(fork)

    def fork_and_join():
        fork()
        torch.cuda.current_stream().wait_stream(side)

    capture(fork_and_join).replay()
    assert x.tolist() == [2] * 3


def test_a_capture_must_not_wait_for_work_from_outside():
    x = torch.ones(3, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)
        event = side.record_event()
    with pytest.raises(RuntimeError, match=r"captur|uncaptured work"):
        capture(lambda: torch.cuda.current_stream().wait_event(event))


@pytest.mark.parametrize(("mode", "refused"), [("global", True), ("thread_local", False)])
def test_another_thread_disturbs_a_global_capture_alone(mode, refused):
    x = torch.ones(3, device="cuda")
    torch.cuda.synchronize()
    errors = []

    def other():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            errors.append(str(error))

    def body():
        x.add_(1)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    if refused:
        with pytest.raises(RuntimeError, match="captur"):
            capture(body, capture_error_mode=mode)
    else:
        capture(body, capture_error_mode=mode)
    assert len(errors) == int(refused)


def test_graphed_callables_with_an_unused_input():
    def function(x, unused):  # noqa: ARG001
        return (x @ x.t()).relu()

    samples = [torch.randn(4, 4, device="cuda", requires_grad=True) for _ in range(2)]
    graphed = torch.cuda.make_graphed_callables(function, tuple(samples), allow_unused_input=True)
    a = torch.randn(4, 4, device="cuda", requires_grad=True)
    b = a.detach().clone().requires_grad_()
    graphed(a, samples[1]).sum().backward()
    function(b, None).sum().backward()
    assert torch.equal(a.grad, b.grad)


def test_operators_of_tensors_on_two_devices_are_refused():
    with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cuda:1"):
        torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match="found at least two devices"):
        torch.ones(3, device="cuda") + torch.ones(3)
    assert (torch.ones(3, device="cuda:1") + torch.tensor(1.0)).tolist() == [2] * 3
    assert torch.ones(3, device="cuda:1").to("cuda:0").device.index == 0


def test_random_numbers_follow_the_seed():
    torch.cuda.manual_seed(3)
    first, second = torch.rand(4, device="cuda"), torch.rand(4, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(4, device="cuda"), first)
    assert not torch.equal(first, second)
    state = torch.cuda.get_rng_state()
    third = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), third)
