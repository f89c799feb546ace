# SPDX-License-Identifier: Apache-2.0
"""Modules that are other modules but for a few names."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import fastamp._C as _C

#: What the import system keeps on every module; a mirror has its own.
_OWN = frozenset(
    ("__name__", "__package__", "__loader__", "__spec__", "__mirrored__", "__replaced__")
)


class Mirror(_C.MirrorBase):
    """Forwards every attribute to another module, except the names it replaces.

    Assignments and deletions go where a reader would look: to the mirrored module, or, for a
    replaced name, to the mirror alone.
    """

    __mirrored__: ModuleType
    __replaced__: frozenset[str]

    def __init__(self, name: str, mirrored: ModuleType, replaced: dict[str, Any]) -> None:
        """Makes the mirror; ``name`` is its own, as in ``sys.modules``."""
        super().__init__(name)
        own = {
            "__mirrored__": mirrored,
            "__replaced__": frozenset(replaced),
            "__spec__": ModuleSpec(name, None, is_package=hasattr(mirrored, "__path__")),
            "__package__": name if hasattr(mirrored, "__path__") else name.rpartition(".")[0],
        }
        del self.__dict__["__doc__"]  # forwarded, as the rest is
        self.__dict__.update(own, **replaced)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a replaced name here and any other in the mirrored module."""
        if name in _OWN or name in self.__replaced__:
            super().__setattr__(name, value)
        else:
            setattr(self.__mirrored__, name, value)

    def __delattr__(self, name: str) -> None:
        """Deletes a replaced name here and any other in the mirrored module."""
        if name in _OWN or name in self.__replaced__:
            super().__delattr__(name)
        else:
            delattr(self.__mirrored__, name)

    def __dir__(self) -> list[str]:
        """Names of the mirrored module and those that are new here."""
        return sorted({*dir(self.__mirrored__), *self.__replaced__})

    def __repr__(self) -> str:
        """Returns what is mirrored."""
        return f"<module {self.__name__!r} over {self.__mirrored__!r}>"


class MirrorFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes ``import <prefix>.x`` give the module ``<target>.x`` itself.

    Args:
        prefix: Package whose submodules are looked for elsewhere, without the dot.
        target: Package that has them.
    """

    def __init__(self, prefix: str, target: str) -> None:
        """See the class."""
        self._prefix = f"{prefix}."
        self._target = f"{target}."

    def _real_name(self, name: str) -> str:
        return self._target + name[len(self._prefix) :]

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Finds the submodule where it really is.

        Raises:
            ModuleNotFoundError: There is none. Not ``None``: other finders would look into the
                mirrored package's folder and load a second copy of what they find.
        """
        if not fullname.startswith(self._prefix):
            return None
        real_name = self._real_name(fullname)
        if real_name not in sys.modules and importlib.util.find_spec(real_name) is None:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:  # noqa: ARG002
        """Leaves it to the import system to make a placeholder."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Puts the real module in the placeholder's place; the import system takes it from there.

        A module cannot be handed over earlier: the import system would overwrite its ``__spec__``.
        """
        sys.modules[module.__name__] = importlib.import_module(self._real_name(module.__name__))
