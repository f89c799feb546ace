# SPDX-License-Identifier: Apache-2.0
"""Who sees a call of ``optimizer.step``: profilers, hooks, guards, and what replaced the method.

Asked by the scalers before they step, and by fastamp's optimizers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as torchs

import fastamp._C as _C

__all__ = [
    "GuardedStep",
    "call_is_a_message",
    "has_hooks",
    "is_replaced",
    "watch_all_steps",
    "watched_if_asked_for",
]

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
        own = vars(self._optimizer())
        if self.guarded is None or "_fastamp_pending_amp_step" in own or "found_inf" in own:
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


def call_is_a_message(optimizer: Any) -> bool:
    """Whether a call of ``optimizer.step`` means to somebody that the step was not skipped."""
    # Accelerate replaces optimizer.step to learn from the call that a step was not skipped: then
    # the call itself is the message. LR schedulers replace it too, but only count.
    replaced = vars(optimizer).get("step")
    if isinstance(replaced, GuardedStep):
        replaced = replaced.replaced
    return replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched")


# fastamp's hooks on the steps of all optimizers, and whether each has something to do at a step of
# fastamp's own. The first one never has.
_for_good: dict[Any, Callable[[], bool]] = {_C.after_optimizer_step: bool}


def watch_all_steps(hook: Any, is_needed: Callable[[], bool]) -> None:
    """Registers a hook on the steps of all optimizers, once and for good.

    One that went with an object could go while torch goes through its table of hooks.
    """
    if hook not in _for_good:
        _for_good[hook] = is_needed
        torchs.register_optimizer_step_post_hook(hook)


def has_hooks(optimizer: Any) -> bool:
    """Whether a hook of this optimizer or of all observes its step."""
    everybodys = torchs._global_optimizer_post_hooks
    others = (
        len(everybodys) > len(_for_good)
        or _C.after_optimizer_step not in everybodys.values()
        or (len(_for_good) > 1 and any(is_needed() for is_needed in _for_good.values()))
    )
    return bool(
        others
        or torchs._global_optimizer_pre_hooks
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
    )


def is_watched(optimizer: Any) -> bool:
    """Whether a profiler or a hook observes its step."""
    return has_hooks(optimizer) or _C.has_observers()


def watched_if_asked_for(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``step`` as torch wraps the step of every optimizer, where that makes a difference.

    torch opens a profiler range and looks for hooks at each step: 20 us or more, a multiple of what
    a fused step of a small model takes. Without a profiler and without hooks that is left out.
    """
    watched: Any = torchs.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A subclass's own step that calls this one is wrapped itself: hooks run once.
        outermost = type(self).step is wrapper
        if outermost and (torch.compiler.is_dynamo_compiling() or is_watched(self)):
            return watched(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    wrapper.hooked = True  # type: ignore[attr-defined]  # torch wraps a step that is not.
    return wrapper
