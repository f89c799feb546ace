# SPDX-License-Identifier: Apache-2.0
"""Decorated functions whose body runs in steps: generators, coroutines, async generators.

Calling one only makes an object; a region around the call would be left before the body runs. So
each step enters what the decorator stands for, and leaves it while the function waits, as
``torch.no_grad`` does for generators.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

#: Runs a call of no arguments where a decorated body is to run, and returns its result.
Run = Callable[[Callable[[], Any]], Any]


def run_within(context: AbstractContextManager[Any]) -> Run:
    """Returns what runs calls in a context, which is entered anew for each."""

    def run(call: Callable[[], Any]) -> Any:
        with context:
            return call()

    return run


def in_steps(function: Any, run: Run, of: Any = None) -> Any:
    """Returns a function of the same kind each of whose steps runs by ``run``.

    ``None`` if its body runs in the call itself, as that of most functions.

    Args:
        function: What makes the generator or awaitable.
        run: Runs a step.
        of: Says what kind it is, in place of ``function``.
    """
    kind = function if of is None else of
    if _is(inspect.isgeneratorfunction, kind):

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Any:
            return (yield from _drive(run, function(*args, **kwargs)))

        flags = getattr(getattr(kind, "__code__", None), "co_flags", 0)
        return types.coroutine(generator) if flags & inspect.CO_ITERABLE_COROUTINE else generator
    if _is(inspect.iscoroutinefunction, kind):

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _Driven(run, function(*args, **kwargs))

        return coroutine
    if _is(inspect.isasyncgenfunction, kind):

        @functools.wraps(function)
        async def async_generator(*args: Any, **kwargs: Any) -> Any:
            wrapped = function(*args, **kwargs)
            step = wrapped.__anext__()
            while True:
                try:
                    item = await _Driven(run, step)
                except StopAsyncIteration:
                    return
                try:
                    sent = yield item
                except GeneratorExit:
                    await _Driven(run, wrapped.aclose())
                    raise
                except BaseException as error:
                    step = wrapped.athrow(error)
                else:
                    step = wrapped.asend(sent)

        return async_generator
    return None


def _is(test: Callable[[Any], bool], function: Any) -> bool:
    """Whether a function, or an object that is called like one, passes a test."""
    method = inspect.getattr_static(type(function), "__call__", None)
    return test(function) or test(method)


class _Driven:
    """An awaitable whose steps run by ``run``."""

    def __init__(self, run: Run, awaitable: Any) -> None:
        self._run = run
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        return _drive(self._run, self._awaitable.__await__())


def _drive(run: Run, wrapped: Any) -> Generator[Any, Any, Any]:
    """Does what ``yield from theirs`` does, each step by ``run``."""
    step = functools.partial(_resume, wrapped, None)
    while True:
        try:
            item = run(step)
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield item
        except GeneratorExit:
            if hasattr(wrapped, "close"):
                run(wrapped.close)
            raise
        except BaseException as error:
            if not hasattr(wrapped, "throw"):
                raise
            step = functools.partial(wrapped.throw, error)
        else:
            step = functools.partial(_resume, wrapped, sent)


def _resume(wrapped: Any, sent: Any) -> Any:
    return next(wrapped) if sent is None else wrapped.send(sent)
