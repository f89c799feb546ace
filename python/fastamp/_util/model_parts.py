# SPDX-License-Identifier: Apache-2.0
"""Finds the models that the modules of a running program are parts of."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["ModelParts"]


class ModelParts:
    """Knows the parts of models as they are assigned, from when it is made until it is closed.

    Of copied and unpickled models it knows nothing: their outermost module is the one called.
    """

    def __init__(self) -> None:
        """Looks at assignments from now on."""
        self._lock = threading.Lock()
        self._parents: Any = WeakIdKeyDictionary()  # module: weak references to modules
        self._hook = register_module_module_registration_hook(self._on_assigned)

    def close(self) -> None:
        """Looks at no more assignments."""
        self._hook.remove()

    def _on_assigned(self, parent: Any, name: str, child: Any) -> None:  # noqa: ARG002
        if isinstance(child, torch.nn.Module):
            with self._lock:
                known = self._parents.setdefault(child, [])
                if not any(reference() is parent for reference in known):
                    known.append(weakref.ref(parent))

    def outermost(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """The modules that one is a part of and that are parts of none; none in a cycle."""
        waiting, known = [module], {id(module)}
        while waiting:
            part = waiting.pop()
            parents = [reference() for reference in self._parents.get(part, [])]
            new = [each for each in parents if each is not None and id(each) not in known]
            if not new:
                yield part
            waiting += new
            known.update(map(id, new))
