# SPDX-License-Identifier: Apache-2.0
"""Attributes of other people's classes and modules, replaced for a while."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import fastamp._C as _C

_ABSENT = object()


class _Patch(NamedTuple):
    owner: Any
    name: str
    value: Any
    original: Any  # as the owner's __dict__ holds it; _ABSENT if it does not

    def is_in_place(self) -> bool:
        return self.owner.__dict__.get(self.name, _ABSENT) is self.value

    def __str__(self) -> str:
        if isinstance(self.owner, ModuleType):
            return f"{self.owner.__name__}.{self.name}"
        return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"


def all_subclasses(cls: type) -> list[type]:
    """The class, those made from it, and so on."""
    direct: list[type] = type.__subclasses__(cls)
    return [cls, *(found for child in direct for found in all_subclasses(child))]


def _forget_new(cls: type) -> None:
    """Completes ``del cls.__new__``, which CPython leaves half done in a class's type slots."""
    for each in all_subclasses(cls):
        if "__new__" not in each.__dict__:
            source = next(base for base in each.__mro__ if "__new__" in base.__dict__)
            _C.copy_new_slot(each, source)


class Patches:
    """A list of replaced attributes of classes and modules that can be taken back exactly."""

    def __init__(self) -> None:
        self._patches: list[_Patch] = []

    def replace(self, owner: type | ModuleType, name: str, value: Any) -> None:
        """Sets ``owner.name`` and remembers what it was, or that it did not exist."""
        self._patches.append(_Patch(owner, name, value, owner.__dict__.get(name, _ABSENT)))
        setattr(owner, name, value)

    def overwritten(self) -> list[str]:
        """Names of the attributes that other code has changed since."""
        return [str(patch) for patch in self._patches if not patch.is_in_place()]

    def undo(self) -> None:
        """Puts every original object back."""
        while self._patches:
            patch = self._patches.pop()
            if patch.original is not _ABSENT:
                setattr(patch.owner, patch.name, patch.original)
                continue
            delattr(patch.owner, patch.name)
            if patch.name == "__new__":
                _forget_new(patch.owner)
