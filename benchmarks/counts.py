# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, as counts: ops, casts, kernel launches, host syncs, bytes."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fastamp

MEBI = 2.0**20
LESS_IS_BETTER = (
    "ops",
    "casts",
    "weight casts",
    "Mi elements cast",
    "launches",
    "syncs",
    "MiB allocated",
    "MiB peak",
    "MiB saved for backward",
    "MiB kept between steps",
    "bytes kept per parameter",
    "peak bytes per parameter",
)
CAST = "aten::_to_copy"
# Dtypes of a cast's source, as the profiler writes them; others are numbers that become tensors.
CAST_DTYPES = {"float", "c10::BFloat16", "c10::Half"}
SYNCS = {"aten::_local_scalar_dense"}
# Runtime calls that put work on a GPU, and those that wait for it.
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"}


def _recorded(step: Callable[[], Any], device: str) -> Any:
    """Returns what the profiler recorded of a step: events, and their tree with arguments."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own, about cycles
        with profile(
            activities=activities, profile_memory=True, record_shapes=True, acc_events=True
        ) as profiler:
            step()
    return profiler.profiler.kineto_results


def _allocations(events: list[Any], device: str) -> Iterator[int]:
    """Yields the bytes of each allocation, negative where they are freed, in order of time."""
    wanted = torch.autograd.DeviceType.CUDA if device == "cuda" else None
    memory = [event for event in events if event.name() == "[memory]"]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        is_cuda = event.device_type() == torch.autograd.DeviceType.CUDA
        if is_cuda == (wanted is not None):
            yield event.nbytes()


def _casts(events: list[Any]) -> Iterator[Any]:
    """Yields the casts from floating dtypes that are not part of an optimizer's step."""
    steps = [
        (event.start_ns(), event.end_ns())
        for event in events
        if event.name().startswith("Optimizer.step")
    ]
    for event in events:
        is_cast = event.name() == CAST and event.dtypes()[0] in CAST_DTYPES
        if is_cast and not any(start <= event.start_ns() <= end for start, end in steps):
            yield event


def _weight_casts(roots: Iterable[Any], weights: Iterable[torch.Tensor]) -> int:
    """Returns how many casts read memory of a weight, the optimizer's step included.

    The memory decides, so that casts count whatever code makes them and by whatever path.
    """
    addresses = {weight.untyped_storage().data_ptr() for weight in weights}
    found, pending = 0, list(roots)
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name == CAST:
            source = event.extra_fields.inputs[0]
            found += getattr(source, "storage_data_ptr", None) in addresses
    return found


@dataclass(frozen=True)
class _Casts:
    """Casts that fastamp made in forward passes: how many, their elements, the bytes of copies."""

    casts: int
    elements: float
    bytes: int

    def __sub__(self, other: _Casts) -> _Casts:
        return _Casts(
            self.casts - other.casts, self.elements - other.elements, self.bytes - other.bytes
        )


def _made(trace: Any) -> _Casts:
    rows = [row for row in trace.rows if row.casts]
    elements = sum(row.cast_bytes / getattr(torch, row.run_dtype).itemsize for row in rows)
    return _Casts(sum(row.casts for row in rows), elements, sum(row.cast_bytes for row in rows))


def _recorded_and_shared(step: Callable[[], Any], device: str) -> tuple[Any, _Casts]:
    """Returns the profiler's record, and the casts in it that are made only because it watches.

    Takes two steps whatever kernels are in place, so that all ways of training remain in step.
    """
    if not fastamp._C.kernels_registered():  # a trace would install the kernels
        recorded = _recorded(step, device)
        step()
        return recorded, _Casts(0, 0, 0)
    with fastamp.debug.trace() as watched:
        recorded = _recorded(step, device)
    with fastamp.debug.trace() as unwatched:
        step()
    return recorded, _made(watched) - _made(unwatched)


def profiled(
    step: Callable[[], Any], device: str, weights: Iterable[torch.Tensor] = ()
) -> dict[str, float]:
    """Counts what a step does, in two calls; call it once before, so that caches are warm.

    A profiler wants to see every cast, and while it runs fastamp shares none between the ops that
    use an activation. A trace counts the casts with it and without; the difference is taken off the
    counts of casts and allocated bytes. ``ops`` and ``MiB peak`` are left as the profiler sees
    them, which for fastamp is more than without it.

    Returns:
        ``ops`` (dispatched, nested ones included), ``casts`` and ``Mi elements cast`` (of floating
        dtypes, outside the optimizer's step), ``weight casts`` (of ``weights``, in it too),
        ``syncs`` (values read by the host, and on a GPU waits beyond those, less the profiler's own
        last one), ``launches`` (GPU), ``MiB allocated`` and ``MiB peak`` above the start.
    """
    recorded, shared = _recorded_and_shared(step, device)
    events = list(recorded.events())
    names, casts = [event.name() for event in events], list(_casts(events))
    level = peak = total = 0
    for size in _allocations(events, device):
        level += size
        peak = max(peak, level)
        total += max(size, 0)
    elements = sum(math.prod(event.shapes()[0]) for event in casts)
    counts = {
        "ops": float(sum(name.startswith(("aten::", "fastamp::")) for name in names)),
        "casts": float(len(casts) - shared.casts),
        "weight casts": float(_weight_casts(recorded.experimental_event_tree(), weights)),
        "Mi elements cast": (elements - shared.elements) / MEBI,
        "syncs": float(sum(name in SYNCS for name in names)),
    }
    if device == "cuda":
        counts["launches"] = float(sum(name in LAUNCHES for name in names))
        waits = sum(name in WAITS for name in names) - 1  # the profiler waits once itself
        counts["syncs"] = float(max(counts["syncs"], waits))
    return {**counts, "MiB allocated": (total - shared.bytes) / MEBI, "MiB peak": peak / MEBI}


def memory_levels(run: Callable[[Callable[[], None]], Any], device: str) -> tuple[int, int, int]:
    """Counts what a run allocates and frees, from the allocator's own records.

    Args:
        run: Gets a function to call at the moment to look at.
        device: ``cpu`` or ``cuda``.

    Returns:
        Bytes above the start: at that moment, at most, and at the end.
    """
    if device == "cuda":
        return _memory_levels_cuda(run)
    moments: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own, about cycles
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler:
            run(lambda: moments.append(time.time_ns()))
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() != torch.autograd.DeviceType.CUDA
    ]
    level = peak = at_moment = 0
    for start, size in sorted(events, key=lambda event: event[0]):
        level += size
        peak = max(peak, level)
        if start <= moments[0]:
            at_moment = level
    return at_moment, peak, level


def _memory_levels_cuda(run: Callable[[Callable[[], None]], Any]) -> tuple[int, int, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    moments: list[int] = []
    run(lambda: moments.append(torch.cuda.memory_allocated() - start))
    peak = torch.cuda.max_memory_allocated() - start
    return moments[0], peak, torch.cuda.memory_allocated() - start


def saved_for_backward(forward: Callable[[], Any], model: torch.nn.Module) -> float:
    """Returns the MiB that a forward pass keeps for its backward pass; shared memory counts once.

    The model's parameters and buffers are left out: they are there anyway.
    """
    own = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and tensor.data_ptr() not in own:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # alive until the end, so that no address is used twice
    size = sum(storages.values())
    del result
    return size / MEBI
