# SPDX-License-Identifier: Apache-2.0
"""Puts modules under policies: what their calls go through."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastamp._dynamo import compiler
from fastamp._policy import op_policies
from fastamp._policy.module_regions import Call, run_in_dtype, run_without_autocast
from fastamp._policy.policy_file import DEVICES, by_device

__all__ = ["ModulePolicy", "policies_of", "put_under", "take_from"]

#: The attribute of a module that holds its policies, outermost first.
_ATTRIBUTE = "_fastamp_module_policies"


class ModulePolicy:
    """Setting that a module runs under: a region, op policies, or both.

    Modules share it with their copies, so that all are released together.

    Args:
        region: "fp32", "pass", a dtype, or None for the region around.
        ops: Policies by op; a value may be a mapping by device.

    Raises:
        ValueError: As :func:`fastamp.policies.set`.
    """

    def __init__(self, region: str | torch.dtype | None, ops: Mapping[str, Any]) -> None:
        """Checks the op policies."""
        self.region = region
        self.ops = dict(ops)
        edits_of: dict[str, dict[str, str]] = {device: {} for device in DEVICES}
        for op, policy in ops.items():
            for device, name in by_device(policy).items():
                edits_of[device][op] = name
        self._overrides = op_policies.checked(edits_of) if ops else None
        self.is_released = False

    def run(self, call: Call) -> Any:
        """Calls a function under the policy."""
        if self._overrides is None:
            return self._in_region(call)
        if self.region is not None:
            call = self._in_region, (call,), {}
        return op_policies.run_under(self._overrides, *call)

    def _in_region(self, call: Call) -> Any:
        if self.region is None:
            function, args, kwargs = call
            return function(*args, **kwargs)
        if isinstance(self.region, torch.dtype):
            return run_in_dtype(call, self.region)
        return run_without_autocast(call, cast_up=self.region == "fp32")

    def __deepcopy__(self, memo: dict[int, Any]) -> ModulePolicy:
        """Returns itself: a copy of the module is released with it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what it was made of."""
        return ModulePolicy, (self.region, self.ops)


class _UnderPolicies:
    """First base of the classes of modules under policies: a call enters the policies.

    A class and not a hook: hooks cannot end a region when a call is interrupted, and none are
    called after an exception in compiled code.
    """

    def __init_subclass__(cls) -> None:
        """Notifies nobody: a class of a user's may keep account of its subclasses."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = super().__call__  # type: ignore[misc]
        return _call_under(self.__dict__.get(_ATTRIBUTE, ()), (call, args, kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the class below does, to be put under policies again."""
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple) or type(self) not in reduced[1]:
            return reduced
        made_of = tuple(_own_class(a) if a is type(self) else a for a in reduced[1])
        return (_make_again, (reduced[0], made_of), *reduced[2:])

    def __prepare_scriptable__(self) -> Any:
        """Called by torch.jit.script.

        Raises:
            RuntimeError: Always: a compiled module would not be under policies.
        """
        raise RuntimeError(
            f"torch.jit.script: expected modules without module policies, got "
            f"{type(self).__name__} with some; release() them first, or use torch.jit.trace"
        )


def _call_under(policies: tuple[ModulePolicy, ...], call: Call) -> Any:
    if not policies:
        function, args, kwargs = call
        return function(*args, **kwargs)
    first, others = policies[0], policies[1:]
    if first.is_released:
        return _call_under(others, call)
    if not others:
        return first.run(call)

    def rest(*args: Any, **kwargs: Any) -> Any:
        return _call_under(others, (call[0], args, kwargs))

    return first.run((rest, call[1], call[2]))


_lock = threading.Lock()
_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def _class_under_policies(own: type) -> type:
    with _lock:
        made = _classes.get(own)
        if made is None:
            names = {
                "__module__": own.__module__,
                "__qualname__": own.__qualname__,
                "__doc__": own.__doc__,
            }
            made = type(own)(own.__name__, (_UnderPolicies, own), names)
            _classes[own] = made
        return made


def _own_class(cls: type) -> type:
    """The class that a class under policies was made from; any other class itself."""
    if cls.__bases__[:1] == (_UnderPolicies,):
        own: type = cls.__bases__[1]
        return own
    return cls


def _make_again(make: Callable[..., Any], made_of: tuple[Any, ...]) -> Any:
    module = make(*made_of)
    module.__class__ = _class_under_policies(type(module))
    return module


def put_under(policies: list[tuple[torch.nn.Module, ModulePolicy]]) -> None:
    """Puts modules under policies, each within those that it has; drops compiled graphs."""
    for module, policy in policies:
        held = module.__dict__.get(_ATTRIBUTE, ())
        if not isinstance(module, _UnderPolicies):
            module.__class__ = _class_under_policies(type(module))
        module.__dict__[_ATTRIBUTE] = (*held, policy)
    if policies:
        compiler.forget_graphs()


def policies_of(module: torch.nn.Module) -> tuple[ModulePolicy, ...]:
    """The policies that a module is under, outermost first; not those of modules around it."""
    return tuple(p for p in module.__dict__.get(_ATTRIBUTE, ()) if not p.is_released)


def take_from(policies: list[tuple[torch.nn.Module, ModulePolicy]]) -> None:
    """Takes modules and their copies out of policies; drops compiled graphs."""
    for module, policy in policies:
        policy.is_released = True
        held = policies_of(module)
        if held:
            module.__dict__[_ATTRIBUTE] = held
            continue
        module.__dict__.pop(_ATTRIBUTE, None)
        # Of a class that others have derived from it since, the call stays, and finds no policies.
        if type(module).__bases__[:1] == (_UnderPolicies,):
            module.__class__ = _own_class(type(module))
    if policies:
        compiler.forget_graphs()
