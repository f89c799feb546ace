# SPDX-License-Identifier: Apache-2.0
"""Stands in the place of ``step`` of an optimizer that a StepGuard guards."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["GuardedStep", "is_replaced"]

_Guarded = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class GuardedStep:
    """A callable in an optimizer's ``__dict__``, under "step".

    Like a bound method it has a ``__func__``, which LR schedulers wrap, but it holds the optimizer
    weakly: the two would only go with Python's garbage collector.

    Attributes:
        replaced: What stood there before, such as an LR scheduler's wrapper; ``None``: nothing.
        guarded: Called as ``guarded(step, args, kwargs)``; ``None`` once the guard was released.
    """

    def __init__(self, optimizer: Any, guarded: _Guarded) -> None:
        """Takes the place of the optimizer's step."""
        self.replaced: Callable[..., Any] | None = vars(optimizer).get("step")
        self.guarded: _Guarded | None = guarded
        self._optimizer = weakref.ref(optimizer)
        functools.update_wrapper(self, self.replaced or type(optimizer).step)
        self.__dict__.pop("__wrapped__", None)
        with contextlib.suppress(ValueError):  # Some functions in C have none.
            self.__signature__ = inspect.signature(optimizer.step)
        optimizer.step = self

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Steps without the guard."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        optimizer: Any = self._optimizer()
        return type(optimizer).step(optimizer, *args, **kwargs)  # The class may have changed.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Steps under the guard, unless a gradient scaler has decided on this step already."""
        optimizer: Any = self._optimizer()
        decided = "_fastamp_pending_amp_step" in vars(optimizer) or "found_inf" in vars(optimizer)
        if self.guarded is None or decided:
            return self.plain(*args, **kwargs)
        return self.guarded(self.plain, args, kwargs)

    @property
    def __func__(self) -> Callable[..., Any]:
        """A function of the optimizer and the arguments of ``step``."""
        return lambda _, *args, **kwargs: self(*args, **kwargs)

    def remove(self) -> None:
        """Gives the place back, or, where others have wrapped this since, stays without effect."""
        self.guarded = None
        optimizer = self._optimizer()
        if optimizer is None or vars(optimizer).get("step") is not self:
            return
        if self.replaced is None:
            del vars(optimizer)["step"]
        else:
            vars(optimizer)["step"] = self.replaced


def is_replaced(optimizer: Any) -> bool:
    """Whether somebody else than a guard has put something in the place of ``step``."""
    step = vars(optimizer).get("step")
    return step is not None and not (type(step) is GuardedStep and step.replaced is None)
