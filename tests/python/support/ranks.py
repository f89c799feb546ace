# SPDX-License-Identifier: Apache-2.0
"""Functions that run in several processes of a group."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp


def _in_group(
    rank: int, work: Callable[[int], Any], count: int, store: str, results: Any, backend: str
) -> None:
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count)
    results[rank] = work(rank)
    dist.destroy_process_group()


def results_of_two_ranks(
    work: Callable[[int], Any], factory: Any, backend: str = "gloo"
) -> Iterator[list[Any]]:
    """For a fixture: yields what work(rank) returned in each of two processes of one group."""
    yield from results_of_ranks(work, factory, 2, backend)


def results_of_ranks(
    work: Callable[[int], Any], factory: Any, count: int, backend: str = "gloo"
) -> Iterator[list[Any]]:
    """The same for any number of processes, and for other backends than gloo."""
    if sys.platform == "win32" or not dist.is_backend_available(backend):
        pytest.skip(f"needs {backend}")
    store = factory.mktemp("store") / "rendezvous"
    # Forked from a process that has imported them: each rank would need seconds for that.
    mp.set_forkserver_preload(["torch.distributed", "fastamp"])
    with mp.get_context("forkserver").Manager() as manager:
        results = manager.dict()
        arguments = work, count, str(store), results, backend
        mp.start_processes(_in_group, arguments, nprocs=count, start_method="forkserver")
        yield [results[rank] for rank in range(count)]
