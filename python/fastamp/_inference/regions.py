# SPDX-License-Identifier: Apache-2.0
"""Modules whose forward pass runs in a region of their own."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import fastamp._C as _C
from fastamp._autocast.region import autocast
from fastamp._dynamo.fake_models import raw_region
from fastamp._inference.export_notice import region_is_meant
from fastamp._policy.module_names import named_modules
from fastamp._policy.module_placement import ModulePolicy, put_under
from fastamp._policy.op_policies import override

__all__ = ["ModuleRegion", "add_region", "edits_of", "keep_in_fp32", "region_of", "set_region"]

_ATTRIBUTE = "_fastamp_region"
_LOWER = (torch.float16, torch.bfloat16)


@dataclasses.dataclass
class ModuleRegion:
    """The region that a module's forward pass runs in.

    Attributes:
        device: Its device type.
        dtype: Its dtype.
        edits: Op policies in force in it, beside those of the process.
        float8: Whether linear layers run in fp8.
        is_open: Whether an exporter has opened the region around the module.
        upcast_outputs: Whether the module then casts what it returns in 16 bits to float32.
    """

    device: str
    dtype: torch.dtype
    edits: dict[str, str] = dataclasses.field(default_factory=dict)
    float8: bool = False
    is_open: bool = False
    upcast_outputs: bool = False

    def enter(self) -> contextlib.AbstractContextManager[Any]:
        """The region as a context."""
        recipe = {"float8": True} if self.float8 else {}
        region = autocast(self.device, dtype=self.dtype, **recipe)
        if not self.edits:
            return region
        stack = contextlib.ExitStack()
        stack.enter_context(override(self.edits, self.device))
        stack.enter_context(region)
        return stack

    @contextlib.contextmanager
    def surround(self) -> Iterator[None]:
        """The region for code that traces the module; also for a device that is not there."""
        self.is_open = True
        try:
            with (
                region_is_meant(),
                override(self.edits, self.device),
                raw_region(self.device, self.dtype),
            ):
                yield
        finally:
            self.is_open = False


def edits_of(function: str, lists: str | Mapping[str, str] | None, device: str) -> dict[str, str]:
    """The op policies that ``lists`` stands for, where they differ from the device's own.

    Raises:
        TypeError: ``lists`` is none of those.
        ValueError: It is a str that names no device, or policies that cannot be in force.
    """
    if lists is None:
        return {}
    if isinstance(lists, str):
        if lists not in ("cpu", "cuda"):
            raise ValueError(
                f"{function}: expected lists to be 'cpu', 'cuda' or policies by op, got {lists!r}"
            )
        return dict(_C.policy_preset(lists, device))
    if not isinstance(lists, Mapping):
        raise TypeError(
            f"{function}: expected lists to be 'cpu', 'cuda' or policies by op, "
            f"got {type(lists).__name__}"
        )
    edits = dict(lists)
    try:
        _C.checked_op_policies([(device, list(edits.items()))])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{function}: lists: {error}") from error
    return edits


def region_of(model: torch.nn.Module) -> ModuleRegion | None:
    """The region that the module was given, if any."""
    found: ModuleRegion | None = vars(model).get(_ATTRIBUTE)
    return found


def set_region(model: torch.nn.Module, region: ModuleRegion) -> None:
    """Gives a module that has a region another one."""
    vars(model)[_ATTRIBUTE] = region


def add_region(function: str, module: torch.nn.Module, region: ModuleRegion) -> None:
    """Lets the forward pass of a module run in a region, in place.

    The module gets a subclass of its class, of the same name: hooks, ``isinstance``, names of
    parameters, copies and pickles stay as they were.

    Raises:
        TypeError: The module is scripted, or has a ``forward`` of its own beside its class's.
    """
    kind = type(module)
    if isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule)):
        # Those replace their class's forward by themselves.
        raise TypeError(f"{function}: expected a module written in Python, got a {kind.__name__}")
    if "forward" in vars(module):
        raise TypeError(
            f"{function}: expected modules that run their class's forward, got a {kind.__name__} "
            f"with a forward of its own, as libraries set it that wrap models"
        )
    set_region(module, region)
    of_module: Any = kind  # mypy takes classes of modules for unhashable
    module.__class__ = _class_with_region(of_module)


def keep_in_fp32(function: str, model: torch.nn.Module, patterns: Iterable[str]) -> None:
    """Puts modules whose names match under the module policy "fp32", for good; the model never is.

    Raises:
        TypeError: ``patterns`` is a str, or not of str.
        ValueError: One of them matches no module.
    """
    wanted: list[Any] = [patterns] if isinstance(patterns, str) else list(patterns)
    inner = [each for each in named_modules(model) if each.bare]
    chosen: dict[int, torch.nn.Module] = {}
    for pattern in wanted:
        if not isinstance(pattern, str):
            got = type(pattern).__name__
            raise TypeError(f"{function}: expected fp32 to be names of modules, got {got}")
        found = [each.module for each in inner if each.has_name_like(pattern)]
        if not found:
            some = ", ".join([each.bare for each in inner][:5])
            raise ValueError(
                f"{function}: expected fp32 to name modules of the model, got {pattern!r}; "
                f"there are {some or 'none'}"
            )
        chosen.update((id(module), module) for module in found)
    policy = ModulePolicy("fp32", {})
    put_under([(module, policy) for module in chosen.values()])


def _up(value: Any) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in _LOWER else tensor

    return tree_map_only(torch.Tensor, cast, value)


@functools.cache
def _class_with_region(kind: Any) -> type[torch.nn.Module]:
    original = kind.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        region = getattr(self, _ATTRIBUTE)
        if region.is_open:
            output = original(self, *args, **kwargs)
            return _up(output) if region.upcast_outputs else output
        with region.enter():
            return original(self, *args, **kwargs)

    def reduce_ex(self: Any, protocol: Any) -> Any:  # noqa: ARG001
        # Pickles name the class that can be imported.
        return _new, (kind,), self.__getstate__() if hasattr(kind, "__getstate__") else vars(self)

    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), {**names, "forward": forward, "__reduce_ex__": reduce_ex})


def _new(kind: Any) -> Any:
    made = _class_with_region(kind)
    return copyreg.__newobj__(made)  # type: ignore[attr-defined]
