# SPDX-License-Identifier: Apache-2.0
"""Support of ``torch.jit.script`` for regions.

TorchScript compiles a class from the source of its methods and knows autocast by the name of the
compiled class. Fastamp's have no source, and torch's own have other methods while fastamp is
installed; but before it compiles a class TorchScript asks it for its name, and checks whether a
class of that name has been compiled.
"""

from __future__ import annotations

from typing import Any

from torch import _jit_internal
from torch.jit import _recursive, _state

#: The attribute by which a class says its name to TorchScript.
OVERRIDE = "_jit_override_qualname"

_being_compiled: set[str] = set()

_METHODS = ("__enter__", "__exit__")


class ScriptedAs:
    """Makes TorchScript take a class for one of torch's, under :data:`OVERRIDE` in the class.

    Args:
        torchs: torch's class. Compiled when TorchScript first asks, with the methods it has now.
        of: The class that has the attribute; by default the one in whose body this is. Its
            subclasses do not inherit it.
    """

    def __init__(self, torchs: type, *, of: type | None = None) -> None:
        """See the class."""
        self._torchs = torchs
        self._of = of
        self._methods = {name: vars(torchs)[name] for name in _METHODS}

    def __set_name__(self, owner: type, name: str) -> None:
        """Notes the class that has this in its body."""
        self._of = owner

    def __get__(self, instance: Any, owner: type) -> str:
        """Returns the name under which TorchScript finds torch's class, compiled.

        Raises:
            AttributeError: A subclass or an instance is asked.
        """
        if instance is not None or owner is not self._of:
            raise AttributeError(OVERRIDE)
        name = f"__torch__.{self._torchs.__module__}.{self._torchs.__qualname__}"
        # The class's own source asks for it again.
        if name not in _being_compiled and _state._get_python_class(name) is None:  # type: ignore[no-untyped-call]
            _being_compiled.add(name)
            try:
                self._compile(name)
            finally:
                _being_compiled.discard(name)
        return name

    def _compile(self, name: str) -> None:
        skipped = ("__dict__", "__weakref__", OVERRIDE)
        members = {key: value for key, value in vars(self._torchs).items() if key not in skipped}
        bases = self._torchs.__bases__
        source: Any = type(self._torchs)(self._torchs.__name__, bases, {**members, **self._methods})
        resolve = _jit_internal.createResolutionCallbackForClassMethods(source)
        compiled = _recursive._compile_and_register_class(source, resolve, name)  # type: ignore[no-untyped-call]
        _state._add_script_class(self._torchs, compiled)
