# SPDX-License-Identifier: Apache-2.0
"""Forward passes of models without values: what they will do, before they run anywhere."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastamp._dynamo import carried_state

__all__ = ["FakeTensors", "fake_copy", "raw_region", "unchanged_state"]


@contextlib.contextmanager
def unchanged_state() -> Iterator[None]:
    """Gives back the generators as they were, and lets compiled functions run eagerly."""
    numpy: Any = sys.modules.get("numpy")
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    carried_state.hold()
    try:
        yield
    finally:
        carried_state.let_go()
        for restore, state in states:
            restore(state)


@contextlib.contextmanager
def raw_region(device: str, dtype: torch.dtype) -> Iterator[None]:
    """A region without cached casts, also for a device that is not there, where torch's are off."""
    enabled, found = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(False)  # No fake cast may outlive what it was made for.
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        torch.set_autocast_dtype(device, found)
        torch.set_autocast_enabled(device, enabled)


class FakeTensors(TorchFunctionMode):
    """Makes fake tensors on a device; while active, of all tensors that deepcopy meets."""

    def __init__(self, function: str, fake_mode: Any, device: str) -> None:
        """Takes the function that errors name as their source, a FakeTensorMode and the device."""
        super().__init__()
        self.function = function
        self._fake_mode = fake_mode
        self._device = device
        self._of_inputs: dict[int, torch.Tensor] = {}

    def of_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes one for each tensor: models ask whether query, key and value are the same."""
        if id(tensor) not in self._of_inputs:
            self._of_inputs[id(tensor)] = self.of(tensor, "each input")
        return self._of_inputs[id(tensor)]

    def of(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """A fake tensor in the place of one that errors call by a name.

        Raises:
            TypeError: The tensor is no plain, dense one.
        """
        from torch._subclasses.fake_tensor import FakeTensor

        is_parameter = isinstance(tensor, torch.nn.Parameter)
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
        is_dense = tensor.layout == torch.strided and not tensor.is_nested
        if not is_plain or not is_dense or tensor.is_quantized:
            kind = type(tensor).__name__
            layout = "" if tensor.layout == torch.strided else f" of layout {tensor.layout}"
            raise TypeError(
                f"{self.function}: expected {name} to be a plain, dense tensor, got {kind}{layout}"
            )
        with torch._C.DisableTorchFunction(), self._fake_mode:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
            )
        if is_parameter:
            return torch.nn.Parameter(fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answers deepcopy's calls."""
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = self.of(tensor, "an attribute of the model")
            return memo[id(tensor)]
        if func is torch.Tensor.clone:  # Of a parameter that no module has registered.
            return self.of(args[0].detach(), "an attribute of the model")
        return func(*args, **(kwargs or {}))


def fake_copy(model: torch.nn.Module, fakes: FakeTensors) -> tuple[torch.nn.Module, dict[int, str]]:
    """A copy of the model without values, and the modules that own its tensors, by their ids."""
    memo: dict[int, Any] = {}
    names: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if id(tensor) not in memo:
                memo[id(tensor)] = fakes.of(tensor, name)
            owner, _, last = name.rpartition(".")
            owner = owner or type(model).__name__
            shown = owner if last == "weight" else f"{owner}.{last}"
            names.setdefault(id(memo[id(tensor)]), []).append(shown)
    try:
        with fakes:
            copied = copy.deepcopy(model, memo)
    except TypeError as error:
        if str(error).startswith(f"{fakes.function}:"):
            raise
        raise TypeError(
            f"{fakes.function}: expected a model that copy.deepcopy can copy, got {error}"
        ) from error
    return copied, {key: " = ".join(found) for key, found in names.items()}
