# SPDX-License-Identifier: Apache-2.0
"""Weights that stay out of fp8 by name, in a program that is not changed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fastamp._float8.recipe import float8_exclude, has_name, named_parts
from fastamp._util.at_exit import AtExit, warn_at_exit
from fastamp._util.model_parts import ModelParts

__all__ = ["NamedExclusions"]

_Parameters = list[tuple[str, "weakref.ref[torch.nn.Parameter]"]]


class NamedExclusions:
    """Excludes weights from fp8 by the names that they have in the program's models.

    Names are those of ``float8.exclude``'s ``where``. They are looked for in the whole model, up to
    the outermost module that has the others as its parts, when a module of it is called first, and
    again when a weight that was excluded is another object. A model's parts are known as they are
    assigned; of copied and unpickled models, from the module that is called down.

    Args:
        names: The names.

    Warns:
        UserWarning: At exit, if the process has called modules and some name was of no weight.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Looks at modules from now on."""
        self._names = list(dict.fromkeys(names))
        self._unmatched = set(self._names)
        self._lock = threading.RLock()
        self._models = ModelParts()
        self._seen: Any = WeakIdKeyDictionary()  # module: its own parameters that are excluded
        self._excluded: Any = WeakIdKeyDictionary()  # parameter: the exclusion
        self._hook = register_module_forward_pre_hook(self._on_called)
        self._has_looked = False
        self._report = AtExit(self._warn)

    def close(self) -> None:
        """Ends all exclusions."""
        self._report.cancel()
        self._models.close()
        self._hook.remove()
        for exclusion in list(self._excluded.values()):
            exclusion.release()

    def _on_called(self, module: torch.nn.Module, inputs: Any) -> None:  # noqa: ARG002
        # Of a module with nothing excluded, which nearly all are, one look-up.
        excluded: _Parameters | None = self._seen.get(module)
        if excluded is None or any(
            module._parameters.get(name) is not parameter() for name, parameter in excluded
        ):
            with self._lock:
                self._look_at(module)

    def _look_at(self, module: torch.nn.Module) -> None:
        self._has_looked = True
        if getattr(module, "_is_replica", False):  # DataParallel's, whose weights are copies
            self._seen[module] = []
            return
        # Last the module itself: one that was replaced is no part of its parents any more.
        for top in (*self._models.outermost(module), module):
            for name, part in named_parts(top):
                self._seen[part] = self._exclude(f"{name}." if name else "", part)

    def _exclude(self, prefix: str, module: torch.nn.Module) -> _Parameters:
        named = [(name, p) for name, p in module._parameters.items() if p is not None]
        for name, parameter in named:
            if self._matches(prefix + name) and parameter not in self._excluded:
                self._excluded[parameter] = float8_exclude(parameter)
        return [(name, weakref.ref(p)) for name, p in named if p in self._excluded]

    def _matches(self, dotted: str) -> bool:
        found = {name for name in self._names if has_name(dotted, name)}
        self._unmatched -= found
        return bool(found)

    def _warn(self) -> None:
        if self._unmatched and self._has_looked:
            names = ", ".join(repr(name) for name in self._names if name in self._unmatched)
            warn_at_exit(
                f"--float8-exclude: expected names of weights of the program's modules, got "
                f"{names}, which no weight has. See docs/float8.md for how names are compared."
            )
