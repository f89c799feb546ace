# SPDX-License-Identifier: Apache-2.0
"""Keeps and puts back what a forward and backward pass may change."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["KeptState"]


class KeptState:
    """Parameters, buffers, gradients and random numbers of a model as they are now.

    Args:
        model: Whose state is kept: copies of parameters and buffers, and the gradients themselves.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Copies the state."""
        self._gradients = [(p, p.grad) for p in model.parameters()]
        self._slots: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for module in model.modules():
            for slots in (module._parameters, module._buffers):
                for name, tensor in slots.items():
                    if tensor is not None:
                        self._slots.append((slots, name, tensor))
                        self._values[id(tensor)] = (tensor, tensor.detach().clone())
        self._random = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._torch = torch.get_rng_state()
        is_cuda_used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if is_cuda_used else []

    def put_back(self) -> None:
        """Makes all as it was, but for gradients, which become None."""
        for slots, name, tensor in self._slots:
            slots[name] = tensor
        with torch.no_grad():
            for tensor, value in self._values.values():
                if not torch.equal(tensor, value):  # a write would end what is kept of the weight
                    tensor.copy_(value)
        for parameter, _ in self._gradients:
            parameter.grad = None
        random.setstate(self._random)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def end(self) -> None:
        """Makes all as it was, gradients as well."""
        self.put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
