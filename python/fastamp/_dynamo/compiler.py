# SPDX-License-Identifier: Apache-2.0
"""Support of ``torch.compile`` for fastamp's classes and policies."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

import fastamp._C as _C

_DYNAMO = "torch._dynamo"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs callbacks once other code has imported a module.

    Importing dynamo costs most of a second, so fastamp never does it itself.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.callbacks: list[Callable[[], None]] = []

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.watch()  # until the import succeeds; this may be only a question whether it would
        if spec is None or spec.loader is None:
            return None
        spec.loader = _CallingBack(spec.loader, self)
        return spec

    def watch(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for callback in tuple(self.callbacks):
            callback()


class _CallingBack(importlib.abc.Loader):
    """The loader of a module, after which callbacks run."""

    def __init__(self, loader: Any, after: _AfterImport) -> None:
        self._loader = loader
        self._after = after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._after.imported()


_after: dict[str, _AfterImport] = {}


def when_loaded(name: str, callback: Callable[[], None]) -> None:
    """Runs ``callback`` now if the module is loaded, else right after it is."""
    if name in sys.modules:
        callback()
        return
    after = _after.setdefault(name, _AfterImport(name))
    after.callbacks.append(callback)
    after.watch()


def no_longer_when_loaded(name: str, callback: Callable[[], None]) -> None:
    """Takes a callback of :func:`when_loaded` back, if it has not run."""
    after = _after.get(name)
    if after is None or callback not in after.callbacks:
        return
    after.callbacks.remove(callback)
    if not after.callbacks and after in sys.meta_path:
        sys.meta_path.remove(after)


def when_dynamo_loads(callback: Callable[[], None]) -> None:
    """Runs ``callback`` now if ``torch._dynamo`` is loaded, else right after it is."""
    when_loaded(_DYNAMO, callback)


def _ends_a_recipe() -> bool:
    """Whether a region made here that names a dtype ends one. A constant in traces (guarded)."""
    return any(_C.float8_numbers())


def _as_torch(*args: Any, **kwargs: Any) -> Any:
    """Traced by dynamo instead of the making of our region; dynamo cannot follow a closure here."""
    dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
    if "float8" in kwargs or dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        torch._dynamo.graph_break("a region with an fp8 recipe runs eagerly")
    if dtype is not None and _ends_a_recipe():
        # torch's would keep it.
        torch._dynamo.graph_break("a region that ends an fp8 recipe runs eagerly")
    return torch.amp.autocast_mode.autocast(*args, **kwargs)


def trace_as_torch_autocast(region_class: type, as_torch: Callable[..., Any] = _as_torch) -> None:
    """Lets dynamo trace a region class of fastamp as it traces ``torch.autocast``.

    Args:
        region_class: The class.
        as_torch: Makes torch's region from the class's arguments; may have no closure.
    """
    import torch._dynamo

    torch._dynamo.substitute_in_graph(
        region_class, is_embedded_type=True, skip_signature_check=True
    )(as_torch)


def trace_as_constant(function: Callable[..., Any]) -> None:
    """Lets dynamo call a function while it traces, and take the result for a constant."""
    import torch._dynamo

    assume_constant: Any = torch._dynamo.assume_constant_result
    assume_constant(function)


when_dynamo_loads(lambda: trace_as_constant(_ends_a_recipe))


def skip_frame_if_traced(reason: str) -> None:
    """Makes dynamo leave the frame that it is tracing, if any, to the interpreter.

    Args:
        reason: For dynamo's logs.
    """
    if _DYNAMO not in sys.modules:
        return
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        is_tracing = InstructionTranslator.current_tx() is not None
    except AttributeError:  # This thread has never traced anything.
        is_tracing = False
    if is_tracing:
        raise torch._dynamo.exc.SkipFrame(reason)


def trace_as(function: Callable[..., Any], traced: Callable[..., Any]) -> None:
    """Lets dynamo trace another function in place of one of fastamp that it cannot look into."""
    import torch._dynamo

    torch._dynamo.substitute_in_graph(function, skip_signature_check=True)(traced)


def forget_graphs() -> None:
    """Drops all compiled graphs: something changed that no guard sees."""
    dynamo = sys.modules.get(_DYNAMO)
    if dynamo is not None:
        dynamo.reset()


_TAG = re.compile(r" ?fastamp-ops-\w+$")


def policies_changed(table_hash: str) -> None:
    """Drops graphs compiled under other op policies, in this process and in on-disk caches.

    Args:
        table_hash: Identifies the policies in force; empty for the defaults.
    """
    config = torch.compiler.config
    users = _TAG.sub("", config.cache_key_tag)
    own = f"fastamp-ops-{table_hash}" if table_hash else ""
    config.cache_key_tag = " ".join(filter(None, (users, own)))
    forget_graphs()
