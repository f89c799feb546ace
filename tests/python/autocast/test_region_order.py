# SPDX-License-Identifier: Apache-2.0
"""Regions left in another order than they were entered: generators, tasks, threads, mistakes."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import pytest
import torch

import fastamp
from patience import patience
from support.autocast_state import torch_state

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MM = torch.ones(4, 4)


def ran_in() -> torch.dtype:
    return torch.mm(MM, MM).dtype


def leave(region: Any) -> Any:
    return region.__exit__(None, None, None)


def test_one_instance_can_be_entered_again_while_open():
    before = torch_state()
    region = fastamp.autocast("cpu", dtype=FP16)
    with region:
        with fastamp.autocast("cpu", enabled=False):
            with region, region:
                assert ran_in() == FP16
            assert ran_in() == FP32
        assert ran_in() == FP16
    assert torch_state() == before


def test_recursion_of_one_instance_with_an_exception_in_the_middle():
    before = torch_state()
    region = fastamp.autocast("cpu", dtype=FP16)

    def descend(depth: int) -> None:
        with region:
            if depth == 0:
                raise ZeroDivisionError
            descend(depth - 1)

    with pytest.raises(ZeroDivisionError):
        descend(100)
    assert torch_state() == before


def test_one_instance_shared_by_threads_keeps_each_threads_state():
    region = fastamp.autocast("cpu", dtype=FP16)
    barrier = threading.Barrier(4, timeout=patience(60))

    def work(index: int) -> bool:
        good = True
        outer = fastamp.autocast("cpu", dtype=BF16, enabled=index % 2 == 0)
        for _ in range(200):
            barrier.wait()
            with outer:
                with region:
                    good &= ran_in() == FP16
                good &= ran_in() == (BF16 if index % 2 == 0 else FP32)
            good &= ran_in() == FP32
        return good

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_region_covers_its_own_thread_only():
    with fastamp.autocast("cpu"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(ran_in).result() == FP32


def test_exit_on_another_thread_is_refused_and_changes_nothing():
    region = fastamp.autocast("cpu")
    with region, ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match="__exit__"):
            pool.submit(leave, region).result()
        assert ran_in() == BF16


def test_exit_without_enter_is_refused_and_changes_nothing():
    before = torch_state()
    with pytest.raises(RuntimeError, match="__exit__"):
        leave(fastamp.autocast("cpu"))
    assert torch_state() == before
    region = fastamp.autocast("cpu")
    with region:
        pass
    with pytest.raises(RuntimeError, match="__exit__"):
        leave(region)
    assert torch_state() == before


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_regions_left_in_any_order_restore_the_state_in_the_end(order: tuple[int, ...]):
    before = torch_state()
    regions = [
        fastamp.autocast("cpu", dtype=BF16),
        fastamp.autocast("cpu", enabled=False, cache_enabled=False),
        fastamp.autocast("cpu", dtype=FP16),
    ]
    runs_in = [BF16, FP32, FP16]
    for region in regions:
        region.__enter__()
    still_open = [0, 1, 2]
    for index in order:
        leave(regions[index])
        still_open.remove(index)
        expected = runs_in[still_open[-1]] if still_open else FP32
        assert ran_in() == expected, (order, index)
    assert torch_state() == before


def test_regions_of_two_devices_left_crosswise_restore_both():
    before = torch_state()
    cpu = fastamp.autocast("cpu", dtype=FP16, cache_enabled=False)
    cuda = fastamp.autocast("cuda", dtype=BF16, enabled=False, cache_enabled=True)
    cpu.__enter__()
    cuda.__enter__()
    leave(cpu)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    leave(cuda)
    assert torch_state() == before


def in_region(dtype: torch.dtype, steps: int) -> Iterator[torch.dtype]:
    with fastamp.autocast("cpu", dtype=dtype):
        for _ in range(steps):
            yield ran_in()


def test_interleaved_generators_restore_the_state_in_the_end():
    before = torch_state()
    first, second = in_region(BF16, 2), in_region(FP16, 4)
    assert [next(first), next(second), next(first)] == [BF16, FP16, FP16]
    assert list(first) == []
    assert ran_in() == FP16
    assert list(second) == [FP16] * 3
    assert torch_state() == before


def test_generator_dropped_in_the_middle_restores_the_state():
    before = torch_state()
    generator = in_region(BF16, 9)
    next(generator)
    del generator
    gc.collect()
    assert torch_state() == before


def test_interleaved_asyncio_tasks_restore_the_state_in_the_end():
    before = torch_state()
    shared = fastamp.autocast("cpu", dtype=FP16)

    async def work(steps: int) -> None:
        for _ in range(20):
            with shared, fastamp.autocast("cpu", dtype=BF16):
                for _ in range(steps):
                    await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(work(steps) for steps in (1, 3, 2, 5)))

    asyncio.run(main())
    assert torch_state() == before


def test_open_region_stays_alive_without_another_reference():
    before = torch_state()
    leave_it = fastamp.autocast("cpu", dtype=FP16).__enter__().__exit__
    gc.collect()
    assert ran_in() == FP16
    leave_it(None, None, None)
    assert torch_state() == before


def test_a_left_region_is_freed():
    class Tracked(fastamp.autocast):
        pass

    region = Tracked("cpu")
    alive = weakref.ref(region)
    with region:
        pass
    region.itself = region  # a cycle, which only the garbage collector can free
    del region
    gc.collect()
    assert alive() is None


def test_thread_that_ends_inside_a_region_harms_nobody():
    region = fastamp.autocast("cpu", dtype=FP16)
    for _ in range(50):
        thread = threading.Thread(target=region.__enter__)
        thread.start()
        thread.join()
    assert ran_in() == FP32
    with region:
        assert ran_in() == FP16


def test_exit_returns_false_and_takes_any_exception_arguments():
    for arguments in [(None, None, None), (KeyError, KeyError(), None)]:
        region = fastamp.autocast("cpu")
        region.__enter__()
        assert region.__exit__(*arguments) is False
