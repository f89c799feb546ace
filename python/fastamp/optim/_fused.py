# SPDX-License-Identifier: Apache-2.0
"""The step that fastamp's optimizers share: gathered in C++, one fused op per device."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch._compile import _disable_dynamo

from fastamp.optim._layout import (
    adopt,
    check_state_dtype,
    has_repeats,
    is_ours,
    warn_of_narrow_moments,
)
from fastamp.optim._torch_step import step_with_torch
from fastamp.optim._watched_step import watched_if_asked_for
from fastamp.optim._weight_copies import check_autocast_dtype, forget_casts, make_weight_copies

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    import fastamp._C as _C
    from fastamp._C import StepGate


def _is_being_traced() -> bool:
    return torch._guards.CompileContext.current_compile_id() is not None


@_disable_dynamo
def _step_uncompiled(optimizer: FusedOptimizer, gate: StepGate | None) -> None:
    optimizer._fastamp_step_now(gate)


class FusedOptimizer(torch.optim.Optimizer):
    """What SGD, Adam and AdamW have in common; a base beside torch's class of the same name."""

    _fastamp_takes_gate: ClassVar[bool] = True
    # Never True, whatever `fused` is: Lightning refuses to clip where it is.
    _step_supports_amp_scaling = False
    _fastamp_gate: StepGate
    # A parameter is listed twice. torch steps it twice, one after the other; a fused step cannot.
    _fastamp_repeats = False
    _fastamp_weight_copies: _C.WeightCopies | None = None
    # torch's constructors call add_param_group; ours warn of groups at their end.
    _fastamp_is_being_made = False
    _torch_class: ClassVar[type[torch.optim.Optimizer]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A subclass with a step of its own is stepped by torch's protocol."""
        super().__init_subclass__(**kwargs)
        if "step" in cls.__dict__:
            cls._fastamp_takes_gate = False

    def _finish_init(
        self, function: str, state_dtype: torch.dtype | None, autocast_dtype: torch.dtype | None
    ) -> None:
        self.__dict__.pop("_step_supports_amp_scaling", None)
        check_state_dtype(function, state_dtype)
        if state_dtype is not None:
            self.defaults["state_dtype"] = state_dtype
            for group in self.param_groups:
                group.setdefault("state_dtype", state_dtype)
        self._fastamp_use_weight_copies(function, autocast_dtype)
        self.__dict__.pop("_fastamp_is_being_made", None)
        warn_of_narrow_moments(function, self.param_groups, stacklevel=3)

    def _fastamp_use_weight_copies(self, function: str, dtype: torch.dtype | None) -> None:
        check_autocast_dtype(function, dtype)
        self._fastamp_weight_copies = make_weight_copies(dtype)

    @watched_if_asked_for
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have gradients.

        Args:
            closure: Called first, with gradients enabled; computes the loss and the gradients.

        Returns:
            What the closure returned, or ``None``.

        Raises:
            RuntimeError: A gradient is sparse (Adam, AdamW), or the closure came with a gradient
                scaler's gate.
            TypeError, ValueError: State, gradients or hyperparameters do not fit the parameters.
                Nothing was changed.
        """
        gate: StepGate | None = self.__dict__.pop("_fastamp_gate", None)
        loss = None
        if closure is not None:
            if gate is not None:
                raise RuntimeError(
                    "step: expected no closure behind a gate, got one: "
                    "the gate belongs to the gradients that were there before it"
                )
            with torch.enable_grad():
                loss = closure()
        self._fastamp_step(gate)
        return loss

    def _fastamp_step(self, gate: StepGate | None) -> None:
        # Dynamo breaks its graph there. Its decorator around all calls would cost 5 us of each.
        if torch.compiler.is_dynamo_compiling():
            _step_uncompiled(self, gate)
        else:
            self._fastamp_step_now(gate)

    def _fastamp_step_now(self, gate: StepGate | None) -> None:
        foreign = self._all_with_gradients() if self._fastamp_repeats else self._native_step(gate)
        if foreign:
            step_with_torch(self, self._torch_class, foreign, gate)
            forget_casts([param for _, param in foreign])

    def _all_with_gradients(self) -> list[tuple[int, Tensor]]:
        return [
            (index, param)
            for index, group in enumerate(self.param_groups)
            for param in group["params"]
            if param.grad is not None
        ]

    def _init_group(self, group: dict[str, Any], *_: Any) -> bool:
        # torch's step runs on a fused optimizer where it was bound before fuse_: an LR scheduler
        # wraps the function it found. It then finds nothing to do in any group.
        if _is_being_traced():
            from torch._dynamo.variables.optimizer import ArgMappingException

            raise ArgMappingException  # Dynamo traces this method instead of calling it.
        if group is self.param_groups[0]:
            self._fastamp_step(self.__dict__.pop("_fastamp_gate", None))
        return False

    def _accelerator_graph_capture_health_check(self) -> None:
        """Does nothing: the fused step can always be captured."""

    def _native_step(self, gate: StepGate | None) -> list[tuple[int, Tensor]]:
        # Returns the parameters that are left to torch, with the index of their group.
        raise NotImplementedError

    @staticmethod
    def _complete_state(param: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> None:
        raise NotImplementedError

    def _fastamp_prepare(self, param: Tensor, group: dict[str, Any]) -> None:
        # Called by the native step for a parameter whose state is missing or of another layout.
        state = self.state[param]
        adopt(param, group, state)
        self._complete_state(param, group, state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters.

        Args:
            param_group: "params", and the options that differ from the optimizer's defaults.

        Raises:
            ValueError: As torch's optimizers, or ``state_dtype`` is not one that moments can have.
                Nothing was changed.

        Warns:
            UserWarning: The group's ``state_dtype`` is bfloat16 and its second beta above 0.99.
        """
        if isinstance(param_group, dict):
            check_state_dtype("add_param_group", param_group.get("state_dtype"))
        super().add_param_group(param_group)
        self._fastamp_repeats = has_repeats(self.param_groups)
        if not self._fastamp_is_being_made:
            warn_of_narrow_moments("add_param_group", self.param_groups[-1:], stacklevel=2)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of an optimizer of this kind, fastamp's or torch's.

        Moments, masters and step counts keep the precision they were saved with, where torch would
        round them to the parameter's dtype.

        Args:
            state_dict: What ``state_dict`` returned.

        Raises:
            ValueError: Its groups do not fit the optimizer's. Nothing was changed.
        """

        def remember(_: Any, final: dict[str, Any]) -> None:
            self.__dict__["_fastamp_source"] = final

        handle = self.register_load_state_dict_pre_hook(remember)  # After all others.
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.__dict__.pop("_fastamp_source", None)

    def __getstate__(self) -> dict[str, Any]:
        """Adds the dtype of weight copies, which is no part of ``state_dict``."""
        state: dict[str, Any] = super().__getstate__()
        if self._fastamp_weight_copies is not None:
            state["_fastamp_autocast_dtype"] = self._fastamp_weight_copies.dtype
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_fastamp_autocast_dtype" in self.__dict__:
            dtype = self.__dict__.pop("_fastamp_autocast_dtype")
            self._fastamp_use_weight_copies("__setstate__", dtype)
        self.__dict__.pop("_step_supports_amp_scaling", None)
        source = self.__dict__.get("_fastamp_source")
        self._fastamp_adopt_state({} if source is None else source)

    def _fastamp_adopt_state(self, source: dict[str, Any]) -> None:
        self._fastamp_repeats = has_repeats(self.param_groups)
        saved = source.get("state", {})
        keys = chain.from_iterable(group["params"] for group in source.get("param_groups", ()))
        for group in self.param_groups:
            if "state_dtype" in self.defaults:
                group.setdefault("state_dtype", self.defaults["state_dtype"])
            for param in group["params"]:
                original = saved.get(next(keys, None))
                state = self.state.get(param)
                if state and is_ours(param, group) and not self._fastamp_repeats:
                    adopt(param, group, state, original)
