# SPDX-License-Identifier: Apache-2.0
"""Names of the modules and parameters of all that a program trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

__all__ = ["ModelNames"]


class ModelNames:
    """Names of modules and parameters, no two the same.

    Those of one model are its own, as in ``named_modules``; the model is named by its class. If
    there is more than one, each name begins with that of its model: its class, with a number from
    the second of a class on. What two models share has the name of the first.

    Args:
        optimizers: Of the program; may grow. They show that there is more than the first model.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Knows no model."""
        self._optimizers = optimizers
        self._models: list[torch.nn.Module] = []
        self._labels: set[str] = set()
        self._modules: dict[torch.nn.Module, str] = {}
        self._parameters: dict[int, tuple[str, torch.nn.Parameter]] = {}

    def add(self, model: torch.nn.Module, alone: bool = False) -> None:
        """Names what a model has that is not named yet.

        Args:
            model: Named before or not.
            alone: Whether it is the only one, whatever parameters optimizers have.
        """
        if any(model is known for known in self._models):
            return
        self._models.append(model)
        label = self._label(type(model).__name__)
        own = {id(parameter) for parameter in model.parameters()}
        prefix = "" if alone or self._is_alone(own) else f"{label}."
        for name, module in model.named_modules():
            self._modules.setdefault(module, f"{prefix}{name}" if name else label)
        for name, parameter in model.named_parameters():
            self._parameters.setdefault(id(parameter), (f"{prefix}{name}", parameter))

    def of_module(self, module: torch.nn.Module) -> str:
        """The name of a module; that of its class if it is of no model."""
        return self._modules.get(module, type(module).__name__)

    def of_parameter(self, parameter: torch.Tensor) -> str | None:
        """The name of a parameter; None if it is of no model."""
        name, _ = self._parameters.get(id(parameter), (None, None))
        return name

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all parameters and buffers of models: ("the buffer 1.running_var", ...)."""
        for name, parameter in self._parameters.values():
            yield f"the parameter {name}", parameter
        for module, path in self._modules.items():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"the buffer {path}.{name}", buffer

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all of models by name, and then those that optimizers have alone."""
        yield from self._parameters.values()
        seen = set(self._parameters)
        for number, optimizer in enumerate(self._optimizers, 1):
            label = f"{type(optimizer).__name__}{number if number > 1 else ''}"
            for index, group in enumerate(optimizer.param_groups):
                for place, parameter in enumerate(group["params"]):
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield f"{label} group {index} parameter {place}", parameter

    def _is_alone(self, own: set[int]) -> bool:
        """Whether no parameter is known that is not one of these."""
        return self._parameters.keys() <= own and all(
            id(parameter) in own
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def _label(self, name: str) -> str:
        number, label = 1, name
        while label in self._labels:
            number += 1
            label = f"{name}{number}"
        self._labels.add(label)
        return label
