# SPDX-License-Identifier: Apache-2.0
"""Decorated generators, coroutines and async generators: each step runs in the region."""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import fastamp
from support.autocast_state import torch_state

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def ran_in() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


@contextmanager
def changes() -> Iterator[None]:
    """A region in which the decorators that need one act."""
    with fastamp.autocast("cpu", dtype=BF16):
        yield


def torchs(*arguments: Any, **options: Any) -> Any:
    return torch.autocast(*arguments, **options)


# Name, decorator, what is around, what a step runs in, what runs between steps.
DECORATORS = {
    "autocast": (lambda: fastamp.autocast("cpu", dtype=FP16), nullcontext, FP16, FP32),
    "cpu.amp": (lambda: fastamp.cpu.amp.autocast(dtype=FP16), nullcontext, FP16, FP32),
    "installed": (lambda: torchs("cpu", dtype=FP16), fastamp.install, FP16, FP32),
    "installed cpu": (lambda: torch.cpu.amp.autocast(dtype=FP16), fastamp.install, FP16, FP32),
    "op_policies": (lambda: fastamp.policies.override({"mm": "fp32"}), changes, FP32, BF16),
    "fp32": (lambda: fastamp.policies.fp32, changes, FP32, BF16),
}


@pytest.fixture(params=DECORATORS)
def decorator(request: pytest.FixtureRequest) -> Iterator[Any]:
    make, around, inside, between = DECORATORS[request.param]
    before = torch_state()
    with around():
        yield make, inside, between
    assert torch_state() == before


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@types.coroutine
def pause(value: Any = None) -> Any:
    return (yield value)


def run_by_hand(coroutine: Any, between: torch.dtype) -> Any:
    """Drives a coroutine; what runs while it waits is outside."""
    try:
        while True:
            coroutine.send(None)
            assert ran_in() == between
    except StopIteration as stop:
        return stop.value


def test_a_generator(decorator: Any) -> None:
    make, inside, between = decorator
    seen: list[Any] = []

    @make()
    def numbers(count: int) -> Any:
        """Doc."""
        seen.append(ran_in())
        for number in range(count):
            try:
                sent = yield number
                seen.append((ran_in(), sent))
            except KeyError:
                seen.append((ran_in(), "thrown"))
        return "the end"

    assert inspect.isgeneratorfunction(numbers)
    assert (numbers.__name__, numbers.__doc__) == ("numbers", "Doc.")
    running = numbers(3)
    assert next(running) == 0
    assert ran_in() == between
    assert running.send("x") == 1
    assert ran_in() == between
    assert running.throw(KeyError()) == 2
    with pytest.raises(StopIteration) as stop:
        next(running)
    assert stop.value.value == "the end"
    assert seen == [inside, (inside, "x"), (inside, "thrown"), (inside, None)]


def test_a_generator_that_is_closed_or_raises(decorator: Any) -> None:
    make, inside, between = decorator
    seen = []

    @make()
    def numbers() -> Any:
        try:
            yield 1
        finally:
            seen.append(ran_in())

    running = numbers()
    next(running)
    running.close()
    assert seen == [inside]
    running = numbers()
    next(running)
    with pytest.raises(ZeroDivisionError):
        running.throw(ZeroDivisionError())
    assert seen == [inside, inside]
    assert ran_in() == between


def test_a_coroutine(decorator: Any) -> None:
    make, inside, between = decorator

    @make()
    async def answer(count: int) -> Any:
        seen = [ran_in()]
        for _ in range(count):
            await pause()
            seen.append(ran_in())
        return seen

    assert inspect.iscoroutinefunction(answer)
    assert run_by_hand(answer(2), between) == [inside] * 3


def test_an_old_coroutine(decorator: Any) -> None:
    make, inside, between = decorator

    @make()
    @types.coroutine
    def answer() -> Any:
        yield
        return ran_in()

    async def caller() -> Any:
        return await answer()

    assert run_by_hand(caller(), between) == inside


def test_an_async_generator(decorator: Any) -> None:
    make, inside, between = decorator
    seen: list[Any] = []

    @make()
    async def numbers() -> Any:
        try:
            await pause()
            sent = yield ran_in()
            await pause()
            seen.append(sent)
            try:
                yield ran_in()
            except KeyError:
                yield ran_in()
        finally:
            await pause()
            seen.append(ran_in())

    assert inspect.isasyncgenfunction(numbers)

    async def caller() -> Any:
        running = numbers()
        found = [await running.__anext__(), await running.asend("x")]
        found.append(await running.athrow(KeyError()))
        await running.aclose()
        return found + [each async for each in numbers()]

    assert run_by_hand(caller(), between) == [inside] * 5
    assert seen == ["x", inside, None, inside]


def test_what_waits_lets_other_tasks_run_outside(decorator: Any) -> None:
    make, inside, between = decorator

    @make()
    async def work() -> Any:
        seen = []
        for _ in range(3):
            seen.append(ran_in())
            await asyncio.sleep(0)
        return seen

    async def others() -> Any:
        seen = []
        for _ in range(3):
            seen.append(ran_in())
            await asyncio.sleep(0)
        return seen

    async def main() -> Any:
        return await asyncio.gather(work(), others(), work())

    assert asyncio.run(main()) == [[inside] * 3, [between] * 3, [inside] * 3]


def test_methods_partials_and_callable_objects() -> None:
    region = fastamp.autocast("cpu", dtype=FP16)

    class Object:
        @region
        def method(self) -> Any:
            yield ran_in()

        def __call__(self) -> Any:
            yield ran_in()

    assert list(Object().method()) == [FP16]
    assert list(region(Object())()) == [FP16]
    assert list(region(lambda: (ran_in() for _ in range(2)))()) == [FP32, FP32]  # made in a call


def test_nested_generators_of_one_region() -> None:
    region = fastamp.autocast("cpu", dtype=FP16)

    @region
    def walk(depth: int) -> Any:
        yield ran_in()
        if depth > 0:
            yield from walk(depth - 1)

    assert list(walk(3)) == [FP16] * 4


def test_uninstalling_gives_torchs_decorator_back() -> None:
    expected = torch.autocast.__call__
    with fastamp.install():
        assert torch.autocast.__call__ is not expected
    assert torch.autocast.__call__ is expected


def test_torch_leaves_the_region_before_the_body_runs() -> None:
    """Why this is written in docs/compatibility.md: remove it when torch does the same."""

    @torch.autocast("cpu", dtype=FP16)
    def numbers() -> Any:
        yield ran_in()

    assert list(numbers()) == [FP32]


def test_fp32_casts_the_arguments_of_a_generator() -> None:
    @fastamp.policies.fp32
    def dtypes(x: torch.Tensor) -> Any:
        yield x.dtype

    low = torch.ones(2, dtype=BF16)
    with fastamp.autocast("cpu", dtype=BF16):
        assert list(dtypes(low)) == [FP32]
    assert list(dtypes(low)) == [BF16]
