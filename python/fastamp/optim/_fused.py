# SPDX-License-Identifier: Apache-2.0
"""The step that fastamp's optimizers share: gathered in C++, one fused op per device."""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch._compile import _disable_dynamo

import fastamp._C as _C
from fastamp._util.short_text import short
from fastamp._util.watched_step import has_hooks, is_replaced, watched_if_asked_for
from fastamp.optim._flashoptim import ERROR_BITS, check_loaded, master_from_error_bits
from fastamp.optim._layout import (
    MASTER,
    MASTERS,
    REMAINDER,
    STORED,
    adopt,
    has_master,
    has_repeats,
    in_torchs_layout,
    is_stepped_by_kernel,
    warn_of_narrow_moments,
    with_dtypes,
    with_dtypes_as_text,
)
from fastamp.optim._remainders import join, of_shards, split
from fastamp.optim._torch_step import step_with_torch
from fastamp.optim._weight_copies import check_autocast_dtype, forget_casts, make_weight_copies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from fastamp._C import AmpStep


def _is_being_traced() -> bool:
    return torch._guards.CompileContext.current_compile_id() is not None


@_disable_dynamo
def _step_uncompiled(optimizer: FusedOptimizer, amp_step: AmpStep | None) -> None:
    optimizer._fastamp_step_now(amp_step)


def _check_is_state(state_dict: Mapping[str, Any]) -> None:
    """Refuses what no ``state_dict`` of an optimizer looks like.

    Raises:
        ValueError: Its groups, or the states of their parameters or their counts of steps, are
            something else.
    """
    groups, states = state_dict["param_groups"], state_dict["state"]
    for name, value, kind in (("param_groups", groups, list), ("state", states, dict)):
        if not isinstance(value, kind):
            raise ValueError(
                f"load_state_dict: expected a {kind.__name__} of {name}, got {type(value).__name__}"
            )
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise ValueError(
                "load_state_dict: expected groups that are dicts with a list of params, got "
                f"{group!r:.200}"
            )
        for key in group["params"]:
            state = states.get(key, {})
            if not isinstance(state, dict):
                raise ValueError(
                    f"load_state_dict: expected a dict as the state of parameter {key!r}, got "
                    f"{type(state).__name__}"
                )
            step = state.get("step")
            if not _may_be_step_count(step):
                raise ValueError(
                    f"load_state_dict: expected step of parameter {key!r} to be 0 or more and, as "
                    f"an int, below 2**63, got {short(step)}"
                )


def _may_be_step_count(step: Any) -> bool:
    if type(step) is torch.Tensor and step.is_cpu and step.numel() == 1:
        step = step.item()
    is_number = isinstance(step, (int, float))  # Of others, the step says what is wrong.
    return not is_number or (step >= 0 and not (isinstance(step, int) and step >= 2**63))


@dataclasses.dataclass
class _Starting:
    """Whether a starting master may wait for its first step: most programs have none."""

    may_wait: bool = False


_starting = _Starting()


def set_starting_masters(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Keeps the float32 values of parameters for the optimizers that step them next."""
    _C.set_starting_masters(list(params), list(masters))
    _starting.may_wait = True


class FusedOptimizer(torch.optim.Optimizer):
    """Base of SGD, Adam, AdamW and Muon, beside torch's class of that name."""

    _fastamp_supports_amp_step: ClassVar[bool] = True
    # Never True, whatever `fused` is: Lightning refuses to clip where it is.
    _step_supports_amp_scaling = False
    _fastamp_pending_amp_step: AmpStep
    # A parameter is listed twice. torch steps it twice, one after the other; a fused step cannot.
    _fastamp_repeats = False
    _fastamp_weight_copies: _C.WeightCopies | None = None
    _fastamp_widens_grads = False
    # torch's constructors call add_param_group; fastamp's warn of groups at their end.
    _fastamp_is_being_made = False
    _torch_class: ClassVar[type[torch.optim.Optimizer]]
    # What refuses values of the options that torch's groups do not have.
    _stored_checks: ClassVar[Mapping[str, Callable[[str, Any], None]]] = STORED

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A subclass with a step of its own is stepped by torch's protocol."""
        super().__init_subclass__(**kwargs)
        if "step" in cls.__dict__:
            cls._fastamp_supports_amp_step = False

    def _finish_init(
        self, function: str, autocast_dtype: torch.dtype | None, **stored: torch.dtype | str | None
    ) -> None:
        # stored: the options of groups that say how state is stored.
        self.__dict__.pop("_step_supports_amp_scaling", None)
        self._fastamp_check_stored(function, stored)
        given = {key: value for key, value in stored.items() if value is not None}
        self.defaults.update(given)
        for group in self.param_groups:
            for key, value in given.items():
                group.setdefault(key, value)
        self._fastamp_use_weight_copies(function, autocast_dtype)
        self.__dict__.pop("_fastamp_is_being_made", None)
        warn_of_narrow_moments(function, self.param_groups, stacklevel=3)

    @classmethod
    def _fastamp_check_stored(cls, function: str, options: Mapping[str, Any]) -> None:
        for key, check in cls._stored_checks.items():
            check(function, options.get(key))
        if "autocast_dtype" in options:
            raise ValueError(
                f"{function}: expected autocast_dtype as an argument of the optimizer, got "
                f"{options['autocast_dtype']!r} in a group: weight copies are for all groups"
            )

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
            RuntimeError: A gradient is sparse (Adam, AdamW), or the closure came with an AmpStep of
                a gradient scaler.
            TypeError, ValueError: State, gradients or hyperparameters do not fit the parameters.
                Nothing was changed.
        """
        amp_step: AmpStep | None = self.__dict__.pop("_fastamp_pending_amp_step", None)
        loss = None
        if closure is not None:
            if amp_step is not None:
                raise RuntimeError(
                    "step: expected no closure with an AmpStep, got one: "
                    "the AmpStep belongs to the gradients that were there before it"
                )
            with torch.enable_grad():
                loss = closure()
        self._fastamp_step(amp_step)
        return loss

    def _fastamp_amp_step(
        self, amp_step: AmpStep, is_observed: bool, *args: Any, **kwargs: Any
    ) -> Any:
        if not (args or kwargs or is_observed) and self._is_stepped_plainly():
            self._fastamp_step_now(amp_step)
            return None
        # Whoever wraps or watches step sees a call of it, which finds amp_step in a slot, and may
        # change parameters and gradients before it.
        amp_step.forget_positions()
        self._fastamp_pending_amp_step = amp_step
        try:
            return self.step(*args, **kwargs)
        finally:
            self.__dict__.pop("_fastamp_pending_amp_step", None)

    def _is_stepped_plainly(self) -> bool:
        return (
            not is_replaced(self)
            and type(self).step is FusedOptimizer.step
            and not torch.compiler.is_dynamo_compiling()
            and not has_hooks(self)
        )

    def _fastamp_step(self, amp_step: AmpStep | None) -> None:
        # Dynamo breaks its graph there. Its decorator around all calls would cost 5 us of each.
        if torch.compiler.is_dynamo_compiling():
            _step_uncompiled(self, amp_step)
        else:
            self._fastamp_step_now(amp_step)

    def _fastamp_step_now(self, amp_step: AmpStep | None) -> None:
        if _starting.may_wait:
            _starting.may_wait = bool(waiting := _C.with_starting_masters())
            for param in waiting:
                self._fastamp_take_notice(param)
        foreign = (
            self._all_with_gradients()
            if self._fastamp_repeats
            else self._native_step(self, amp_step)
        )
        if foreign:
            step_with_torch(self, self._torch_class, foreign, amp_step)
            forget_casts([param for _, param in foreign])

    def _fastamp_take_notice(self, param: Tensor) -> None:
        # A starting master of a parameter that is frozen, or has a state: it was set later.
        state = self.state.get(param, {})
        if not param.requires_grad:
            if any(param is own for group in self.param_groups for own in group["params"]):
                _C.forget_starting_masters([param])
        elif not MASTERS.isdisjoint(state):
            master = _C.kept_starting_master(param)
            if master is None:
                return
            for key in MASTERS.intersection(state):
                if key == MASTER:
                    state[key].copy_(master)
                elif key == REMAINDER:
                    state[key].copy_(split(param, master))
                else:
                    state[MASTER] = master
                    del state[key]
            _C.forget_starting_masters([param])

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
            self._fastamp_step(self.__dict__.pop("_fastamp_pending_amp_step", None))
        return False

    def _accelerator_graph_capture_health_check(self) -> None:
        """Does nothing: the fused step can always be captured."""

    _cuda_graph_capture_health_check = _accelerator_graph_capture_health_check  # in torch 2.10

    @staticmethod
    def _native_step(optimizer: Any, amp_step: AmpStep | None) -> list[tuple[int, Tensor]]:
        # Returns the parameters that are left to torch, with the index of their group.
        raise NotImplementedError

    @staticmethod
    def _complete_state(param: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> None:
        raise NotImplementedError

    def _fastamp_prepare(self, param: Tensor, group: dict[str, Any]) -> None:
        # Called by the native step for a parameter whose state is missing or of another layout.
        state = self.state[param]
        complete = dict(state)  # All of it is made before any of it is kept: memory may run out.
        adopt(param, group, complete)
        self._complete_state(param, group, complete)
        for key in state.keys() - complete.keys():
            del state[key]
        state.update(complete)
        if has_master(param):
            _C.forget_starting_masters([param])  # Its state has the master now.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters.

        Args:
            param_group: "params", and the options that differ from the optimizer's defaults.

        Raises:
            ValueError: As torch's optimizers, or ``state_dtype``, ``state_rounding`` or ``master``
                is none that there is. Nothing was changed.

        Warns:
            UserWarning: The group's ``state_dtype`` is bfloat16, rounded to nearest, and its second
                beta above 0.99.
        """
        if isinstance(param_group, dict):
            self._fastamp_check_stored("add_param_group", param_group)
        super().add_param_group(param_group)
        self._fastamp_repeats = has_repeats(self.param_groups)
        _C.forget_frozen_starting_masters()
        if not self._fastamp_is_being_made:
            warn_of_narrow_moments("add_param_group", self.param_groups[-1:], stacklevel=2)

    def masters(self) -> dict[Tensor, Tensor]:
        """Returns the float32 values that the step computes with, for all parameters.

        For a 16-bit parameter its master, as it is kept or put together from its remainder; for
        others the parameter itself. To export a model in float32: ``{name: masters[p] for name, p
        in model.named_parameters()}``. Shares memory with the optimizer where it can; changes
        nothing.
        """
        return {
            param: self._master_of(param)
            for group in self.param_groups
            for param in group["params"]
        }

    def _master_of(self, param: Tensor) -> Tensor:
        state = self.state.get(param, {})
        if not has_master(param):
            return param.detach()
        starting = _C.starting_master_of(param)
        if starting is not None:  # A state is older.
            return starting
        if ERROR_BITS in state:
            return master_from_error_bits(param, state[ERROR_BITS])
        if REMAINDER in state:
            return join(param, state[REMAINDER])
        if MASTER not in state:
            return param.detach().float()
        current: Tensor = of_shards(_C.current_master, param, state[MASTER])
        return current

    def forget_remainders(self, params: Iterable[Tensor] | None = None) -> None:
        """Makes parameters their own masters.

        For parameters that were written since the last step and whose float32 value is to be what
        was written, exactly: with ``master="remainder"`` the remainder of the old value would move
        it by up to half a unit of the parameter, and a float32 master stays where it rounds to what
        was written.

        Args:
            params: Some of the optimizer's parameters; ``None``: all.
        """
        if params is None:
            params = chain.from_iterable(group["params"] for group in self.param_groups)
        params = list(params)
        for param in params:
            state = self.state.get(param, {})
            for key in {REMAINDER, ERROR_BITS}.intersection(state):
                state[key].zero_()
            if MASTER in state:
                state[MASTER].copy_(param.detach())
        _C.forget_starting_masters(params)

    def state_dict(self, *, portable: bool = False) -> dict[str, Any]:
        """Returns the optimizer's state, as torch's ``state_dict``.

        Args:
            portable: In the layout that torch's optimizer of the same name has for float32
                parameters: moments in float32, no masters or remainders. The masters are the
                weights of a float32 model: :meth:`masters`, or
                :meth:`fastamp.optim.LowPrecisionWeights.state_dict`. Waits for the device.
        """
        if portable:
            return in_torchs_layout(super().state_dict())
        before = self._fastamp_states_before_steps()
        replaced = {param: self.state[param] for param in before if param in self.state}
        self.state.update(before)
        try:
            state: dict[str, Any] = super().state_dict()
        finally:
            self.state.update(replaced)
            for param in before.keys() - replaced.keys():
                del self.state[param]
        state["param_groups"] = [with_dtypes_as_text(group) for group in state["param_groups"]]
        return state

    def _fastamp_states_before_steps(self) -> dict[Tensor, dict[Any, Any]]:
        # Those that the next step would make of starting masters, which nothing else saves.
        states: dict[Tensor, dict[Any, Any]] = {}
        waiting = {id(param) for param in _C.with_starting_masters()}
        for group in self.param_groups if waiting else ():
            for param in group["params"]:
                wanted = (
                    id(param) in waiting
                    and has_master(param)
                    and is_stepped_by_kernel(param, group)
                )
                master = _C.starting_master_of(param) if wanted else None
                if master is not None:
                    state = self.state.get(param, {})
                    states[param] = {k: v for k, v in state.items() if k not in MASTERS}
                    states[param][MASTER] = master
                    self._complete_state(param, group, states[param])
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of an optimizer of this kind, fastamp's or torch's.

        Moments, masters and step counts keep the precision they were saved with, where torch would
        round them to the parameter's dtype. What the groups of this optimizer say of how state is
        stored (``state_dtype``, ``state_rounding``, ``master``, ``ns_dtype``) stays as it is, and
        the state is converted to it; where they say nothing, the loaded groups may.

        Args:
            state_dict: What ``state_dict`` returned.

        Raises:
            ValueError: It is no state of an optimizer, its groups do not fit this one's or have a
                value of an option that is none, or FlashOptim saved it in a way that is not read
                (docs/optim.md). As after any error, hooks' included, nothing was changed.
        """

        def remember(_: Any, final: dict[str, Any]) -> dict[str, Any]:
            _check_is_state(final)
            groups = [with_dtypes(saved) for saved in final["param_groups"]]
            final = {**final, "param_groups": groups}
            for saved in final["param_groups"]:
                self._fastamp_check_stored("load_state_dict", saved)
            for group, saved in zip(self.param_groups, final["param_groups"], strict=False):
                for param, key in zip(group["params"], saved["params"], strict=False):
                    check_loaded("load_state_dict", final["state"].get(key), param, saved)
            self.__dict__["_fastamp_source"] = final
            return final

        handle = self.register_load_state_dict_pre_hook(remember)  # After all others.
        before = dict(self.__dict__)  # torch puts new objects in the place of those in it.
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.__dict__ = before
            raise
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
        source = self.__dict__.get("_fastamp_source")
        if source is not None:
            for group, loaded in zip(self.param_groups, state["param_groups"], strict=True):
                loaded.update({key: group[key] for key in STORED if key in group})
        else:
            for group in state["param_groups"]:
                self._fastamp_check_stored("__setstate__", group)
        super().__setstate__(state)
        if "_fastamp_autocast_dtype" in self.__dict__:
            dtype = self.__dict__.pop("_fastamp_autocast_dtype")
            self._fastamp_use_weight_copies("__setstate__", dtype)
        self.__dict__.pop("_step_supports_amp_scaling", None)
        self._fastamp_adopt_state({} if source is None else source)

    def _fastamp_adopt_state(self, source: dict[str, Any]) -> None:
        self._fastamp_repeats = has_repeats(self.param_groups)
        saved = source.get("state", {})
        keys = chain.from_iterable(group["params"] for group in source.get("param_groups", ()))
        for group in self.param_groups:
            for key in STORED:
                if key in self.defaults:
                    group.setdefault(key, self.defaults[key])
            for param in group["params"]:
                original = saved.get(next(keys, None))
                state = self.state.get(param)
                if state and is_stepped_by_kernel(param, group) and not self._fastamp_repeats:
                    adopt(param, group, state, original)
