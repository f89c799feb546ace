# SPDX-License-Identifier: Apache-2.0
"""Listens to the calls of a training step: backward, scalers, optimizers, LR schedulers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fastamp._autocast.region import autocast
from fastamp._util.patches import Patches, all_subclasses
from fastamp._util.tool_guard import ToolGuard

__all__ = ["CallListener", "is_notifying", "listening"]


class CallListener:
    """A base of what gets calls while it listens. What its methods raise, its guard gets."""

    guard: ToolGuard

    def made_optimizer(self, optimizer: Any) -> None:
        """An optimizer was made."""

    def before_backward(self, tensors: Any) -> None:
        """A backward pass is about to begin at these."""

    def after_backward(self) -> None:
        """Called when it has ended."""

    def after_gradients(self, outputs: Any, gradients: Any, create_graph: bool) -> None:
        """``torch.autograd.grad`` has returned gradients of outputs."""

    def before_zero_grad(self, owner: Any) -> None:
        """The gradients of an optimizer or a module are about to be set to None or 0."""

    def before_save(self, what: Any) -> None:
        """``torch.save`` is about to write something."""

    def made_region(self, region: Any, is_wanted: bool) -> None:
        """A region was made, by a call that wants it to be enabled or not."""

    def before_scale(self, scaler: Any, outputs: Any) -> None:
        """A scaler is about to multiply something."""

    def after_scale(self, scaler: Any, scaled: Any) -> None:
        """Called when it has returned this."""

    def before_unscale(self, scaler: Any, optimizer: Any) -> None:
        """A scaler is about to divide the gradients of an optimizer, for a step or by itself."""

    def after_unscale(self, scaler: Any, optimizer: Any) -> None:
        """Called when it has."""

    def before_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """A scaler is about to have an optimizer make a step, or skip it."""

    def after_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """Called when it has."""

    def before_update(self, scaler: Any, new_scale: Any) -> None:
        """A scaler is about to end an iteration, or is given a scale."""

    def after_update(self, scaler: Any) -> None:
        """A scaler has ended an iteration."""

    def before_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:
        """An optimizer is about to make a step, within a scaler's or by itself."""

    def after_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:
        """Called when it has."""

    def before_schedule(self, scheduler: Any) -> None:
        """An LR scheduler is about to make a step."""


_SCALER_EVENTS = {
    "scale": "scale",
    "unscale_": "unscale",
    "step": "scaler_step",
    "update": "update",
}

_WITHOUT_SUBJECT = ("before_schedule", "before_zero_grad", "after_update")


class _Within(threading.local):
    def __init__(self) -> None:
        self.calls: list[tuple[int, str]] = []
        self.notifying = 0

    def has(self, name: str) -> bool:
        return any(name == other for _, other in self.calls)


# With the thread whose calls it is notified of; None: of those of all threads.
_listeners: list[tuple[CallListener, int | None]] = []
_within = _Within()
_patches = Patches()
_handles: list[Any] = []
_lock = threading.Lock()  # Of listeners that come and go: the first patches, the last undoes it.


@contextlib.contextmanager
def listening(listener: CallListener, *, this_thread: bool = False) -> Iterator[None]:
    """Notifies a listener of calls inside the block. May end within a call that it is notified of.

    Args:
        listener: Is notified.
        this_thread: Of calls of the thread that begins the block alone.
    """
    entry = listener, threading.get_ident() if this_thread else None
    with _lock:
        if not _listeners:
            _patch()
        _listeners.append(entry)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(entry)
            if not _listeners:
                _patches.undo()
                _let_go_of_optimizers()


def _notify(event: str, *args: Any) -> None:
    # Those that began last first: what ends a listener's block comes after what is within.
    here = threading.get_ident()
    _within.notifying += 1
    try:
        for listener, thread in reversed(_listeners.copy()):
            if thread in (None, here):
                listener.guard.run(getattr(listener, event), *args)
    finally:
        _within.notifying -= 1


def is_notifying() -> bool:
    """Whether a listener of this thread runs now: what it computes is not the program's."""
    return _within.notifying > 0


def _let_go_of_optimizers() -> None:
    # torch walks through these hooks while it calls them. The last listener goes at another time.
    if not _within.has("optimizer hook"):
        while _handles:
            _handles.pop().remove()


def _patch() -> None:
    _let_go_of_optimizers()
    _patches.replace(torch.optim.Optimizer, "__init__", _init(torch.optim.Optimizer.__init__))
    _patches.replace(torch.autograd, "backward", _backward(torch.autograd.backward))
    _patches.replace(torch.autograd, "grad", _grad(torch.autograd.grad))
    _patches.replace(torch, "save", _save(torch.save))
    # Not `step`, whose warnings would name this file instead of the program's line.
    _patches.replace(LRScheduler, "_update_lr", _notifying("schedule", LRScheduler._update_lr))
    for cls in all_subclasses(TorchGradScaler):
        for name, event in _SCALER_EVENTS.items():
            if name in vars(cls):
                _patches.replace(cls, name, _notifying(event, vars(cls)[name]))
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        _patches.replace(owner, "zero_grad", _notifying("zero_grad", owner.zero_grad))
    for region in (torch.amp.autocast_mode.autocast, autocast):
        _patches.replace(region, "__init__", _region_init(region.__init__))
    _handles.append(register_optimizer_step_pre_hook(_before_optimizer_step))
    _handles.append(register_optimizer_step_post_hook(_after_optimizer_step))


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        _notify("made_optimizer", optimizer)

    return init


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # Of a reentrant checkpoint: part of another.
            return original(tensors, *args, **kwargs)
        _notify("before_backward", tensors)
        result = original(tensors, *args, **kwargs)
        _notify("after_backward")
        return result

    return backward


def _grad(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(outputs, *args, **kwargs)
        _notify("after_gradients", outputs, result, bool(kwargs.get("create_graph", False)))
        return result

    return grad


def _save(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
        _notify("before_save", obj)
        return original(obj, *args, **kwargs)

    return save


def _region_init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(region: Any, *args: Any, **kwargs: Any) -> None:
        original(region, *args, **kwargs)
        if not torch.compiler.is_compiling():
            _notify(
                "made_region",
                region,
                bool(kwargs.get("enabled", args[2] if len(args) > 2 else True)),
            )

    return init


def _notifying(event: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that notifies of its calls; of a class's and its base's, of the outer one."""

    @functools.wraps(original)
    def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        key = (id(owner), event)
        if torch.compiler.is_compiling() or key in _within.calls:
            return original(owner, *args, **kwargs)
        subject = args[0] if args else next(iter(kwargs.values()), None)
        _within.calls.append(key)
        try:
            _notify_of(f"before_{event}", owner, subject)
            result = original(owner, *args, **kwargs)
        finally:
            _within.calls.remove(key)
        _notify_of(f"after_{event}", owner, result if event == "scale" else subject)
        return result

    return method


def _notify_of(event: str, owner: Any, subject: Any) -> None:
    if not hasattr(CallListener, event):
        return
    _notify(event, owner, *([] if event in _WITHOUT_SUBJECT else [subject]))


def _before_optimizer_step(optimizer: Any, *_: Any) -> None:
    _notify_of_optimizer("before_optimizer_step", optimizer)


def _after_optimizer_step(optimizer: Any, *_: Any) -> None:
    _notify_of_optimizer("after_optimizer_step", optimizer)


def _notify_of_optimizer(event: str, optimizer: Any) -> None:
    if torch.compiler.is_compiling():
        return
    key = (id(optimizer), "optimizer hook")
    _within.calls.append(key)
    try:
        _notify(event, optimizer, _within.has("scaler_step"))
    finally:
        _within.calls.remove(key)
