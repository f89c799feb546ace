# SPDX-License-Identifier: Apache-2.0
"""fastamp's host code on the simulated device: memory, streams and waits that a GPU would hide."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastamp
from support.simulated_cuda import allocations_fail, counted, late_work

pytestmark = pytest.mark.simulated
MANY = 6000  # more than a launch's arguments hold


def own_stream(device: str = "cuda:0") -> Any:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def unscale(grads: Any, found: torch.Tensor) -> None:
    half = torch.full((), 0.5, device=found.device)
    torch.ops.fastamp.unscale_and_check_(grads, half, found)


def norm_of(grads: Any) -> Any:
    """Queues a pass that counts; returns what reads its norm and its counts."""
    device = grads[0].device
    one, found = torch.ones((), device=device), torch.zeros((), device=device)
    norm = torch.zeros((), dtype=torch.float64, device=device)
    counts = torch.zeros(len(grads), 2, dtype=torch.int64, device=device)

    def run() -> None:
        torch.ops.fastamp.norm_and_check_(grads, one, found, norm, non_finite_counts=counts)

    return run, lambda: (norm.item(), counts.sum().item())


def test_a_table_is_read_before_its_pinned_memory_is_used_again():
    grads, found = torch.ones(3 * MANY, device="cuda").split(3), torch.zeros((), device="cuda")
    stream = own_stream()
    with late_work(), torch.cuda.stream(stream):
        unscale(grads, found)
        # Of all sizes that the table may have had.
        sizes = [1 << power for power in range(15, 21)]
        reused = [torch.empty(size, dtype=torch.uint8).pin_memory().fill_(255) for size in sizes]
        stream.synchronize()
    assert len(reused) == len(sizes)
    assert torch.cat(grads).unique().tolist() == [0.5]


def test_a_table_under_capture_is_the_graphs_own():
    grads, found = torch.ones(3 * MANY, device="cuda").split(3), torch.zeros((), device="cuda")
    half = torch.full((), 0.5, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with counted("copies_to_device") as captured, torch.cuda.graph(graph):
        torch.ops.fastamp.unscale_and_check_(grads, half, found)
    assert captured["copies_to_device"] == 0  # Newer torch keeps pinned memory for the graph.
    sizes = [1 << power for power in range(15, 21)]
    reused = [torch.empty(size, dtype=torch.uint8).pin_memory().fill_(255) for size in sizes]
    with counted("copies_to_device") as counts:
        graph.replay()
    assert counts["copies_to_device"] == 0
    assert len(reused) == len(sizes)
    assert torch.cat(grads).unique().tolist() == [0.5]


def test_passes_of_all_lengths_count_from_zero_on_each_stream_and_device():
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        for stream in (torch.cuda.default_stream(device), own_stream(device)):
            with late_work(), torch.cuda.stream(stream):
                for length in (3, MANY, 5, 300):
                    grads = torch.ones(length, device=device).split(1)
                    run, read = norm_of(grads)
                    for _ in range(2):
                        run()
                    assert read() == (length, 0)


def test_a_pass_over_more_gradients_than_any_before_has_room_for_their_counts():
    def beside_torch() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    rows = 5 * MANY
    with torch.cuda.stream(own_stream()):
        norm_of(torch.ones(3, device="cuda").split(1))[0]()
        run, read = norm_of(torch.ones(rows, device="cuda").split(1))
        before = beside_torch()
        run()
        assert beside_torch() - before >= 16 * rows  # Two counts of 8 bytes each.
        assert read() == (rows, 0)


def test_a_graphs_passes_count_from_zero_in_each_replay():
    grads = torch.ones(40, device="cuda").split(1)
    run, read = norm_of(grads)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
        assert read() == (40, 0)
        run()  # beside it, with memory of the stream
        assert read() == (40, 0)


def capture_while(work: Callable[[], None], device: str = "cuda:0") -> None:
    """A capture that calls of any thread may break, during which another thread works."""
    errors = []

    def run() -> None:
        try:
            work()
        except RuntimeError as error:
            errors.append(error)

    x = torch.ones(3, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(own_stream(device)):
        graph.capture_begin(capture_error_mode="global")  # empties no cache before
        x.add_(1)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        graph.capture_end()
    assert not errors
    graph.replay()
    assert x.tolist() == [2] * 3


def test_what_a_pass_needs_does_not_break_the_capture_of_another_thread():
    stream = own_stream()  # without memory yet
    grads = torch.ones(20 * MANY, device="cuda").split(1)  # and a table of a new size
    run, read = norm_of(grads)
    with torch.cuda.stream(stream):  # what torch's allocator needs would break it
        warm = [torch.empty(n << 18, dtype=torch.uint8, device="cuda") for n in (128, 4, 4, 4)]
        del warm

    def work() -> None:
        with torch.cuda.stream(stream):
            run()

    capture_while(work)
    work()  # the device's memory was set back when the capture ended
    stream.synchronize()
    assert read() == (20 * MANY, 0)


def test_a_full_device_gives_back_what_is_cached_and_no_error_stays():
    grads = torch.ones(40, device="cuda").split(1)
    run, read = norm_of(grads)
    stream = own_stream()
    cached = torch.empty(32 << 20, device="cuda")
    del cached
    with torch.cuda.stream(stream):
        torch.empty(16 << 20, device="cuda")  # what the pass takes from the caching allocator
        with allocations_fail(until_freed=True):
            run()
        assert read() == (40, 0)


@pytest.mark.parametrize("kept", [False, True], ids=["cached", "kept"])
def test_a_cast_serves_its_stream_and_its_graph_alone(kept):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 8, device="cuda"))
    x = torch.randn(2, 8, device="cuda")
    if kept:
        fastamp.casts.keep([weight])

    def casts_of(region: Any) -> int:
        with fastamp.debug.trace() as trace, region:
            x @ weight
        return trace.totals["weight_casts"]

    outer = fastamp.autocast("cuda", dtype=torch.float16)
    with torch.no_grad(), outer:
        casts_of(torch.cuda.stream(torch.cuda.current_stream()))
        assert casts_of(torch.cuda.stream(torch.cuda.current_stream())) == 0
        own = own_stream()
        assert casts_of(torch.cuda.stream(own)) == 1
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=own):  # which has a cast already
            y = x @ weight
        weight.mul_(2)
        graph.replay()
        assert torch.equal(y, x.half() @ weight.half())
    fastamp.casts.drop()


class Halves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 4, device="cuda:0")
        self.second = torch.nn.Linear(4, 4, device="cuda:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).to("cuda:1"))


@pytest.mark.parametrize("inf_in", ["first", "second", ""])
@pytest.mark.parametrize("own", [False, True], ids=["default streams", "own streams"])
def test_numbers_of_a_step_are_read_when_they_have_arrived(own, inf_in):
    model = Halves()
    optimizer = fastamp.optim.SGD(model.parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cuda", init_scale=8.0, growth_interval=100)
    streams = [own_stream(d) if own else torch.cuda.default_stream(d) for d in ("cuda:0", "cuda:1")]
    with late_work(), torch.cuda.stream(streams[1]), torch.cuda.stream(streams[0]):
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4, device="cuda:0")).square().mean()).backward()
            overflows = step == 1 and inf_in
            if overflows:
                getattr(model, inf_in).weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            assert scaler.step_was_skipped == bool(overflows)
            scaler.update()
            assert scaler.get_scale_async() in (8.0, 4.0)
            names = [gradient.name for gradient in scaler.overflow_report(model).gradients]
            assert names == ([f"{inf_in}.weight"] if inf_in and step >= 1 else [])
    assert scaler.get_scale() == (4.0 if inf_in else 8.0)


def test_neither_steps_nor_their_log_wait_for_the_device():
    model = torch.nn.Linear(4, 4, device="cuda")
    optimizer = fastamp.optim.SGD(model.parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cuda")
    rows: list[Any] = []
    with late_work(), fastamp.debug.log_to(lambda *row: rows.append(row), scaler):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4, device="cuda")).square().mean()).backward()
            with counted("waits_for_undone", "cudaStreamSynchronize") as counts:
                scaler.step(optimizer)
                scaler.update()
            assert counts["waits_for_undone"] == counts["cudaStreamSynchronize"] == 0
    assert [step for _, step in rows] == [0, 1, 2]


def test_losses_of_two_devices_are_scaled_where_they_are():
    scaler = fastamp.GradScaler("cuda", init_scale=8.0)
    devices = ("cuda:0", "cuda:1", "cuda:0")
    losses = [torch.full((), 2.0, device=device) for device in devices]
    for scaled in (scaler.scale(losses), [scaler.scale(loss) for loss in losses]):
        assert [str(loss.device) for loss in scaled] == list(devices)
        assert [loss.item() for loss in scaled] == [16.0] * 3


def test_a_graphed_step_is_captured_while_another_thread_pins_memory():
    def pin() -> None:
        torch.empty(3 << 20, dtype=torch.uint8).pin_memory()

    class Pins(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.cuda.is_current_stream_capturing():
                thread = threading.Thread(target=pin)
                thread.start()
                thread.join()
            return super().forward(x)

    model = Pins(4, 4, device="cuda")
    optimizer = fastamp.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, device="cuda")
    loss = torch.nn.functional.mse_loss
    step = fastamp.cuda.graphed_step(model, loss, optimizer, fastamp.GradScaler("cuda"), (x, x))
    assert step(x, x).item() > 0


def test_a_graphed_step_reads_pinned_inputs_when_it_runs():
    model = torch.nn.Linear(4, 4, device="cuda")
    optimizer = fastamp.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(2, 4, device="cuda")
    loss = torch.nn.functional.mse_loss
    step = fastamp.cuda.graphed_step(model, loss, optimizer, fastamp.GradScaler("cuda"), (x, x))
    zero = step(x, x).item()
    pinned = torch.ones(2, 4).pin_memory()
    with late_work():
        loss = step(pinned, pinned)
        torch.cuda.current_stream().synchronize()  # as the docstring asks for before the next line
        pinned.fill_(7)
    assert loss.item() == zero
