"""Where a step's time goes, as counts: ops, casts, kernel launches, host syncs, bytes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MEBI = 2.0**20
LESS_IS_BETTER = (
    "ops",
    "casts",
    "Mi elements cast",
    "launches",
    "syncs",
    "MiB allocated",
    "MiB peak",
    "MiB saved for backward",
)
CAST = "aten::_to_copy"
# Of its source, as the profiler writes them; other sources are numbers that become tensors.
CAST_DTYPES = {"float", "c10::BFloat16", "c10::Half"}
SYNCS = {"aten::_local_scalar_dense"}
# Runtime calls that put work on a GPU, and those that wait for it.
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"}


def _events(step: Callable[[], Any], device: str) -> list[Any]:
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
    return list(profiler.profiler.kineto_results.events())


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


def profiled(step: Callable[[], Any], device: str) -> dict[str, float]:
    """Counts what one call of a step does; call it once before, so that caches are warm.

    Returns:
        ``ops`` (dispatched, nested ones included), ``casts`` and ``Mi elements cast``
        (``aten::_to_copy`` outside the optimizer's step; one of ours that is made below the
        dispatcher shows there too while a profiler runs), ``syncs`` (values read by the host, and
        on a GPU waits beyond those, less the profiler's own last one), ``launches`` (GPU), ``MiB
        allocated`` and ``MiB peak`` above the start.
    """
    events = _events(step, device)
    names, casts = [event.name() for event in events], list(_casts(events))
    level = peak = total = 0
    for size in _allocations(events, device):
        level += size
        peak = max(peak, level)
        total += max(size, 0)
    counts = {
        "ops": float(sum(name.startswith(("aten::", "fastamp::")) for name in names)),
        "casts": float(len(casts)),
        "Mi elements cast": sum(math.prod(event.shapes()[0]) for event in casts) / MEBI,
        "syncs": float(sum(name in SYNCS for name in names)),
    }
    if device == "cuda":
        counts["launches"] = float(sum(name in LAUNCHES for name in names))
        waits = sum(name in WAITS for name in names) - 1  # the profiler waits once itself
        counts["syncs"] = float(max(counts["syncs"], waits))
    return {**counts, "MiB allocated": total / MEBI, "MiB peak": peak / MEBI}


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
