# SPDX-License-Identifier: Apache-2.0
"""Runs of one step under policies, each from the same state, and what their gradients agree to."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastamp._debug.bisect.run_state import KeptState
from fastamp._debug.bisect.search import OutOfRuns
from fastamp._debug.bisect.traffic import Traffic
from fastamp._dynamo import carried_state
from fastamp._policy.module_policies import for_modules
from fastamp._policy.op_policies import override
from fastamp._policy.policy_file import PolicyFile
from fastamp._policy.table import op_table

__all__ = ["Gradients", "Runs", "agreement", "file_of"]

Gradients = dict[str, torch.Tensor]
#: An op and the module whose calls of it are meant; None: all calls in the program.
Place = tuple[str, str | None]


def agreement(gradients: Gradients, reference: Gradients) -> float:
    """``2 a.b / (a.a + b.b)`` of all gradients as one vector: 1 if they are equal.

    It is the cosine if both have the same length, and less if not. 0 if one is not finite.
    """
    product = squares = 0.0
    for name in gradients.keys() | reference.keys():
        own, other = gradients.get(name), reference.get(name)
        if own is not None:
            squares += _dot(own, own)
        if other is not None:
            squares += _dot(other, other)
        if own is not None and other is not None:
            product += _dot(own, other)
    value = 2 * product / squares if squares else 1.0
    return value if value == value else 0.0  # NaN: inf / inf, or in the gradients


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    wide_a, wide_b = (t.to_dense().double().reshape(-1) for t in (a, b))
    return float(torch.dot(wide_a, wide_b).item())


def file_of(places: Iterable[Place]) -> PolicyFile:
    """The policy file that puts ops into fp32, in modules or everywhere."""
    file = PolicyFile()
    for op, module in places:
        if module is None:
            file.ops[op] = "fp32"
        else:
            file.modules.setdefault(glob.escape(module), {})[op] = "fp32"
    return file


class Runs:
    """Runs a step and counts how often.

    Args:
        step: Forward and backward pass.
        model: Whose gradients count.
        most: How many runs are allowed.
    """

    def __init__(self, step: Callable[[], Any], model: torch.nn.Module, most: int) -> None:
        """Runs nothing yet."""
        self.count = 0
        self._step, self._model, self._most = step, model, most
        self._state = KeptState(model)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Inside the block steps can run; after it, all is as it was."""
        hook = register_optimizer_step_pre_hook(_refuse_step)
        carried_state.hold()  # compiled functions run eagerly, in all runs alike
        try:
            yield
        finally:
            carried_state.let_go()
            hook.remove()
            self._state.end()

    def gradients(self) -> Gradients:
        """Runs the step as it is.

        Raises:
            OutOfRuns: All runs are used up.
            ValueError: There are no gradients then.
        """
        if self.count == self._most:
            raise OutOfRuns
        self.count += 1
        self._state.put_back()
        with torch.enable_grad():
            self._step()
        made = {n: p.grad for n, p in self._model.named_parameters() if p.grad is not None}
        if not made:
            raise ValueError(
                "bisect: expected step to leave gradients in the model's parameters, got none; it "
                "has to call backward(), and not to clear them afterwards"
            )
        self._state.put_back()
        return made

    def gradients_and_time(self) -> tuple[Gradients, float]:
        """Runs the step as it is, and predicts its time, see ``time_of``."""
        with Traffic() as traffic:
            return self.gradients(), traffic.time

    def in_fp32(self) -> tuple[Gradients, tuple[str, ...]]:
        """Runs the step with regions that cast nothing, because it enters them itself.

        Returns:
            The gradients, and the ops that ran in 16 bits all the same.
        """
        with override({row.op: "pass" for row in op_table()}), Traffic() as traffic:
            return self.gradients(), tuple(sorted(traffic.low))

    def under(self, places: Iterable[Place]) -> tuple[Gradients, float]:
        """Runs the step with ops in fp32, and predicts its time."""
        file = file_of(places)
        with contextlib.ExitStack() as stack:
            if file.modules:
                stack.enter_context(for_modules(self._model, file.modules))
            stack.enter_context(override(file.ops))
            return self.gradients_and_time()


def _refuse_step(optimizer: Any, *_: Any) -> None:
    raise ValueError(
        f"bisect: expected step to be a forward and backward pass, got one that calls "
        f"{type(optimizer).__name__}.step(); leave that out"
    )
