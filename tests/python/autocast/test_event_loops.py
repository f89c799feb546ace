# SPDX-License-Identifier: Apache-2.0
"""Regions in asyncio: decorated coroutines are right, a region across an await is warned of."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import fastamp
from support.autocast_state import torch_state
from support.children import check_program

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SAID = r"^autocast: expected a region in an asyncio task to end before the task waits"


def ran_in() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


@pytest.fixture(params=["fastamp", "installed"])
def autocast(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    installed = request.param == "installed"
    before = torch_state()
    with fastamp.install() if installed else nullcontext():
        yield torch.autocast if installed else fastamp.autocast
    assert torch_state() == before


def quietly(main: Any) -> Any:
    """Runs a coroutine; warnings are errors, which the loop hands on."""
    failures = []

    async def watched() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: failures.append(about))
        return await main

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = asyncio.run(watched())
    assert not failures
    return result


def test_two_tasks_with_decorated_coroutines_run_each_in_its_own(autocast: Any):
    seen: dict[str, list[torch.dtype]] = {"a": [], "b": [], "none": []}

    async def work(name: str) -> None:
        for _ in range(4):
            seen[name].append(ran_in())
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(
            autocast("cpu", dtype=BF16)(work)("a"),
            autocast("cpu", dtype=FP16)(work)("b"),
            work("none"),
        )

    quietly(main())
    assert seen == {"a": [BF16] * 4, "b": [FP16] * 4, "none": [FP32] * 4}


def test_blocks_between_awaits_are_right(autocast: Any):
    async def work(dtype: torch.dtype) -> None:
        for _ in range(4):
            with autocast("cpu", dtype=dtype):
                assert ran_in() == dtype
            await asyncio.sleep(0)
            assert ran_in() == FP32

    async def main() -> None:
        await asyncio.gather(work(BF16), work(FP16))

    quietly(main())


def test_a_region_around_the_loop_is_its_own_affair(autocast: Any):
    async def work() -> None:
        with autocast("cpu", dtype=FP16):
            assert ran_in() == FP16
        await asyncio.sleep(0)
        assert ran_in() == BF16

    async def main() -> None:
        await asyncio.gather(work(), work())

    with autocast("cpu", dtype=BF16):
        quietly(main())


def test_an_open_region_across_an_await_is_warned_of_at_its_line(autocast: Any):
    seen = []

    async def holds() -> None:
        with autocast("cpu", dtype=BF16):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def other() -> None:
        seen.append(ran_in())
        await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(holds(), other())

    with pytest.warns(UserWarning, match=SAID) as caught:
        asyncio.run(main())
    assert seen == [BF16]  # As with torch: that is what is warned of.
    assert caught[0].filename == __file__
    assert caught[0].lineno == holds.__code__.co_firstlineno + 1


def test_many_regions_ask_the_loop_once():
    handles = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon
        loop.call_soon = lambda *args, **options: (  # type: ignore[method-assign]
            handles.append(args),
            call_soon(*args, **options),
        )[1]
        for _ in range(1000):
            with fastamp.autocast("cpu", dtype=BF16):
                pass
        del loop.call_soon
        await asyncio.sleep(0)

    quietly(main())
    assert len(handles) == 1


def test_a_compiled_function_in_a_task():
    @torch.compile(backend="eager")
    def work() -> torch.Tensor:
        with fastamp.autocast("cpu", dtype=BF16):
            return torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    async def main() -> Any:
        return work().dtype

    assert quietly(main()) == BF16


def test_an_interrupted_note_leaves_no_region(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        loop = asyncio.get_running_loop()

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(loop, "call_soon", interrupt)
        try:
            with pytest.raises(KeyboardInterrupt), fastamp.autocast("cpu", dtype=BF16):
                pass
        finally:
            monkeypatch.undo()
        assert ran_in() == FP32

    before = torch_state()
    asyncio.run(main())
    assert torch_state() == before


def test_programs_without_asyncio_do_not_import_it():
    program = (
        "import sys, torch; had = 'asyncio' in sys.modules; import fastamp\n"
        "with fastamp.autocast('cpu', dtype=torch.bfloat16): pass\n"
        "assert had or 'asyncio' not in sys.modules; print('fine')"
    )
    assert check_program("-c", program) == "fine\n"
