# SPDX-License-Identifier: Apache-2.0
"""Programs written for torch.amp run on fastamp unchanged, libraries they use included."""

from __future__ import annotations

import inspect
import multiprocessing.spawn
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.amp.autocast_mode import autocast as TorchAutocast  # noqa: N812
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

import fastamp._C as _C
import fastamp.cpu.amp
import fastamp.cuda.amp
from fastamp._autocast.entering import as_enter
from fastamp._autocast.script import OVERRIDE, ScriptedAs
from fastamp._install import attention_libraries
from fastamp._scaler.grad_scaler import GradScaler
from fastamp._util.patches import Patches
from fastamp._util.stepwise import in_steps, run_within

__all__ = ["Installation", "install", "is_installed", "torch_kernels", "uninstall"]

_lock = threading.RLock()
_patches: Patches | None = None
_registered_kernels = False

_decorate = vars(TorchAutocast)["__call__"]


def _decorate_steps_too(self: Any, func: Any) -> Any:
    stepping = in_steps(func, run_within(self))
    return _decorate(self, func) if stepping is None else stepping


#: torch's region classes, and what replaces their methods: the subclasses have their own, too.
_REGIONS: dict[type, dict[str, Any]] = {
    cls: {
        "__enter__": as_enter(_C.RegionMethod(vars(cls)["__enter__"], True)),
        "__exit__": _C.RegionMethod(vars(cls)["__exit__"], False),
        OVERRIDE: ScriptedAs(cls, of=cls),
    }
    for cls in (
        TorchAutocast,
        torch.cuda.amp.autocast_mode.autocast,
        torch.cpu.amp.autocast_mode.autocast,
    )
}

#: What torch's constructors make while installed. Subclasses from other libraries are left alone.
_SCALERS: dict[type, type] = {
    TorchGradScaler: GradScaler,
    torch.cuda.amp.grad_scaler.GradScaler: fastamp.cuda.amp.GradScaler,
    torch.cpu.amp.grad_scaler.GradScaler: fastamp.cpu.amp.GradScaler,
}


def _new_scaler(cls: type, *args: Any, **kwargs: Any) -> Any:
    made = _SCALERS.get(cls, cls)
    parent: Any = super(TorchGradScaler, made).__new__  # type: ignore[misc]
    return parent(made) if parent is object.__new__ else parent(made, *args, **kwargs)


_new_scaler.__name__ = "__new__"
_new_scaler.__signature__ = inspect.signature(TorchGradScaler.__init__)  # type: ignore[attr-defined]


_in_children: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []


@contextmanager
def in_spawned_processes(function: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """Has processes that ``multiprocessing`` spawns call a function once they are installed."""
    call = (function, arguments)
    _in_children.append(call)
    try:
        yield
    finally:
        _in_children.remove(call)


def _install_and(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    install()
    for function, arguments in calls:
        function(*arguments)


class _InstallInChild:
    """Installs in the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _install_and, (list(_in_children),)


_preparation_data = multiprocessing.spawn.get_preparation_data


def _preparation_data_with_us(name: str) -> dict[str, Any]:
    return {**_preparation_data(name), "fastamp": _InstallInChild()}


class Installation:
    """Result of :func:`install`; as a context manager it uninstalls at the end of its block.

    A block that found fastamp installed leaves it installed.
    """

    def __init__(self, is_first: bool) -> None:
        """Notes whether this call changed anything."""
        self._is_first = is_first

    def __enter__(self) -> Installation:
        """Does nothing: :func:`install` has installed."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        """Uninstalls if this call installed; see :func:`uninstall` for what it raises."""
        if self._is_first:
            self._is_first = False
            uninstall()


def install() -> Installation:
    """Makes ``torch.autocast`` and ``torch.amp.GradScaler`` fastamp's, for the whole process.

    torch's own classes change in place, so code that imported them earlier, compiled functions and
    third-party libraries follow. Regions of ``torch.autocast`` and its deprecated spellings become
    fastamp's; ``torch.amp.GradScaler(...)`` (and ``torch.cuda.amp``'s, ``torch.cpu.amp``'s) makes a
    ``fastamp.GradScaler``. Scalers that exist already, and subclasses from other libraries, stay as
    they are. Also registers fastamp's autocast kernels where importing fastamp did not. Processes
    that ``multiprocessing`` forks or spawns are installed, too, but no other processes. Calling it
    again changes nothing.

    Returns:
        A context manager: ``with fastamp.install(): ...`` uninstalls at the end.

    Note:
        Thread-safe against itself; where kernels are still to be registered
        (``FASTAMP_NO_REGISTER=1``), no other thread may be running ops under autocast.
    """
    global _patches, _registered_kernels
    with _lock:
        if _patches is not None:
            return Installation(is_first=False)
        _registered_kernels = not _C.kernels_registered()
        _C.register_kernels()
        attention_libraries.follow()
        patches = Patches()
        for cls, attributes in _REGIONS.items():
            for name, value in attributes.items():
                patches.replace(cls, name, value)
        patches.replace(TorchAutocast, "__call__", _decorate_steps_too)
        patches.replace(TorchGradScaler, "__new__", staticmethod(_new_scaler))
        patches.replace(multiprocessing.spawn, "get_preparation_data", _preparation_data_with_us)
        _patches = patches
        return Installation(is_first=True)


def uninstall() -> None:
    """Undoes :func:`install`: every attribute and registration is the object it was before.

    Kernels that ``import fastamp`` registered stay; :func:`fastamp.debug.torch_kernels` is about
    those. Scalers made in between keep working. Does nothing if fastamp is not installed.

    Raises:
        RuntimeError: This thread is in an autocast region, another thread is in one of
            ``torch.autocast``'s, or other code has replaced one of the changed attributes since.
            Nothing is changed.
    """
    global _patches
    with _lock:
        if _patches is None:
            return
        _check_quiet()
        overwritten = _patches.overwritten()
        if overwritten:
            raise RuntimeError(
                f"uninstall: expected the attributes that install() set, got others in "
                f"{', '.join(overwritten)}. Undo those changes first."
            )
        if _registered_kernels:
            _C.unregister_kernels()
            attention_libraries.unfollow()
        _patches.undo()
        _patches = None


def _check_quiet() -> None:
    if _C.region_depth() > 0:
        raise RuntimeError(
            "uninstall: expected to be called outside autocast regions, got a call inside one. "
            "Leave every autocast region of this thread first."
        )
    open_regions = _C.open_torch_regions()
    if open_regions > 0:
        raise RuntimeError(
            "uninstall: expected no thread to be in an autocast region, got "
            f"{open_regions} open. Let the other threads leave theirs first."
        )


def is_installed() -> bool:
    """Returns whether :func:`install` is in force."""
    return _patches is not None


@contextmanager
def torch_kernels() -> Iterator[None]:
    """Gives torch its own autocast kernels back for a while, for the whole process.

    For comparisons and benchmarks: no other thread may be running ops under autocast when the block
    begins or ends. May be nested; where fastamp's kernels are not in place it does nothing.

    Raises:
        RuntimeError: The block begins inside an autocast region of this thread. Nothing is changed.
    """
    were_registered = _C.kernels_registered()
    _C.unregister_kernels()
    try:
        yield
    finally:
        if were_registered:
            _C.register_kernels()


os.register_at_fork(after_in_child=_C.after_fork_in_child)
