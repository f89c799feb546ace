# SPDX-License-Identifier: Apache-2.0
"""State of a gradient scaler: checkpoints, copies, past iterations and their reports."""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState

import fastamp._C as _C
from fastamp._scaler.all_reduce import all_reduce
from fastamp._scaler.causes import cause_of
from fastamp._scaler.checks import Past, checked_past, checked_state
from fastamp._scaler.json_state import json_of_state, state_of_json
from fastamp._scaler.kept_statistics import RestoredStatistics
from fastamp._scaler.logs import note_core
from fastamp._scaler.on_skip import SkipHook, SkipHooks
from fastamp._scaler.rank_reports import gathered
from fastamp._scaler.reports import (
    OverflowReport,
    StepRecord,
    UnderflowReport,
    make_report,
    make_underflow_report,
    names_by_identity,
    warn_of_overflows,
)
from fastamp._util.tensors import ordinary_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.utils.hooks import RemovableHandle


def _overflowed(state: dict[str, Any]) -> bool:
    # sync: the iteration is not over, so its flags are not on their way yet
    return any(flag.item() != 0.0 for flag in state["found_inf_per_device"].values())


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that calls a method as long as its object lives.

    The core, which the scaler owns, must hold no reference back to it: Python's garbage collector
    could not see the cycle.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*args)

    return call


_Scaler = TypeVar("_Scaler", bound="ScalerState")


class ScalerState(TorchGradScaler):
    """The half of ``fastamp.GradScaler`` that remembers; the other one acts."""

    # Instances carry these names only when they are in use: by default an instance's __dict__ is
    # exactly torch's, so state and pickles go both ways.
    _min_scale: float | None = None
    _max_scale: float | None = None
    _hysteresis: int = 1
    _init_hysteresis_tracker: int = 1
    _hysteresis_tracker: Tensor | None = None
    _fast_growth_interval: int = 0
    _init_fast_growth_limit: float = math.inf
    _fast_growth_limit: Tensor | None = None
    _open_passes: frozenset[int] = frozenset()
    process_group: ProcessGroup | None = None
    _fuse: bool = False
    _keep_scaled_grads: bool = False
    _history_size: int = 128
    # Slots, and so not in __dict__ either. All are there once _core was asked for.
    __slots__ = (
        "_is_new",
        "_kept_core",
        "_loaded_report",
        "_skip_hooks",
        "_statistics",
        "_times_scaled",
    )
    _is_new: bool  # Until the first update(), of one that was neither loaded nor copied.
    _kept_core: _C.ScalerCore
    _loaded_report: OverflowReport | None
    _skip_hooks: SkipHooks  # Only once a hook was registered.
    _statistics: RestoredStatistics  # Only once a module was given.
    _times_scaled: int  # Calls of scale(): in between, gradients may have come that are scaled.

    @property
    def _core(self) -> _C.ScalerCore:
        try:
            return self._kept_core
        except AttributeError:  # A new scaler, or one that was copied or unpickled.
            self._times_scaled = getattr(self, "_times_scaled", 0)
            self._kept_core = _C.ScalerCore(
                float(self._init_scale), self._history_size, self._device, weakly(self._move_state)
            )
            self._load_past(checked_past(self.__dict__.pop("_saved_past", {})), self._init_scale)
            if hasattr(self, "_skip_hooks"):
                self._kept_core.notify_skips(weakly(self._notify_of_skip))
            note_core(self, self._kept_core)
            return self._kept_core

    def _stage_of(self, optimizer: torch.optim.Optimizer) -> OptState:
        # Looks without inserting: a refused call must leave the mapping as it was.
        state = self._per_optimizer_states.get(id(optimizer))
        stage: OptState = OptState.READY if state is None else state["stage"]
        return stage

    def _expect_scale(self, function: str) -> None:
        if self._scale is None or self._growth_tracker is None:
            self._check_scale_growth_tracker(function)

    def _agree_on(self, flag: Tensor) -> None:
        """Raises a flag on every rank if one rank has raised it. Called by the core."""
        all_reduce(flag, True, self.process_group, "agree on an overflow")

    def _move_state(self, key: int, free: int) -> None:
        """An optimizer is gone: another may come to have its address, what it did still counts."""
        if self._enabled and key in self._per_optimizer_states:
            self._per_optimizer_states[free] = self._per_optimizer_states.pop(key)

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        with ordinary_tensors():
            super()._lazy_init_scale_growth_tracker(dev)
            self._make_extra_tensors(dev)

    def _make_extra_tensors(self, dev: Any) -> None:
        if self._hysteresis > 1:
            self._hysteresis_tracker = torch.full(
                (), self._init_hysteresis_tracker, dtype=torch.int32, device=dev
            )
        if self._fast_growth_interval > 0:
            self._fast_growth_limit = torch.full(
                (), self._init_fast_growth_limit, dtype=torch.float32, device=dev
            )

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last :meth:`step` was skipped, of any optimizer of its iteration.

        After ``scaler.update()``, ``if not scaler.step_was_skipped: scheduler.step()`` is exact for
        every optimizer. The answer is sent to the host by :meth:`update` and is there one step
        later; asked earlier on CUDA, this waits for it. False before the first step and if the
        scaler is disabled.
        """
        if not self._enabled:
            return False
        states = tuple(self._per_optimizer_states.values())
        stepped = [state for state in states if state["stage"] is OptState.STEPPED]
        if stepped:
            return any(_overflowed(state) for state in stepped)
        return self._synchronized().skipped

    def step_was_skipped_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns :attr:`step_was_skipped` for one optimizer's last step."""
        if not self._enabled:
            return False
        core = self._synchronized()
        state = self._per_optimizer_states.get(id(optimizer))
        if state is not None and state["stage"] is OptState.STEPPED:
            return _overflowed(state)
        return core.was_skipped(optimizer)

    def _synchronized(self) -> _C.ScalerCore:
        """Returns the core when it knows what all iterations have done; waits for the device."""
        warn_of_overflows(self._core.poll(True))
        return self._core

    def get_scale(self) -> float:
        """Returns the scale; 1.0 if the scaler is disabled. Waits for the device on CUDA."""
        scale: float = super().get_scale()
        return scale

    def get_scale_async(self) -> float:
        """Returns the last scale that has arrived on the host; never waits.

        Exact on the CPU; on CUDA usually that of one :meth:`update` ago. ``init_scale`` before the
        first update, 1.0 if the scaler is disabled.
        """
        if not self._enabled:
            return 1.0
        warn_of_overflows(self._core.poll(False))
        return self._core.scale

    def overflow_report(
        self, named_parameters: Any = None, *, group: ProcessGroup | None = None
    ) -> OverflowReport:
        """Reports which gradients were inf or NaN at the last skipped step.

        Counting costs nothing while gradients are finite. Gradients of DTensors are counted on
        their own shard; gradients of other tensor subclasses are not counted.

        Args:
            named_parameters: Where names come from: ``model.named_parameters()`` or the model. Else
                they are the optimizer's ``param_names``, or positions.
            group: Gather the reports of its ranks on the first of them, 2048 bytes from each: the
                gradients with most inf and NaN, with their ranks. Every member must make the call,
                after ranks have agreed on the skip (``process_group``, meshes of DTensors).
                Nothing is sent if no step was skipped.

        Returns:
            A report that is false if no step was skipped; ``str`` of it is a table. Waits for the
            device only if there was an overflow or the last iteration's outcome is not known yet.

        Raises:
            TypeError: ``named_parameters`` is not iterable.
        """
        report = self._own_report(names_by_identity(named_parameters))
        return report if group is None else gathered(report, group)

    def _own_report(self, names: dict[int, str]) -> OverflowReport:
        if not self._enabled:
            return OverflowReport()
        core = self._synchronized()
        now = [
            key for key, state in tuple(self._per_optimizer_states.items()) if _overflowed(state)
        ]
        found = core.overflow(now)
        if found is None:
            return self._loaded_report or OverflowReport()
        report = make_report(*found, names)
        return dataclasses.replace(report, cause=cause_of(self, report.step))

    def underflow_report(self, named_parameters: Any = None) -> UnderflowReport:
        """Reports how many gradient elements were 0, and what another scale would do to them.

        Always on. Counting takes a run over the gradients of its own, so it is done at a few
        iterations: 0, 1, 2, 4 and so on up to 1024, and then each 1024th. The report is of the last
        of these. Not counted: gradients of float64, sparse ones with duplicate indices, of tensor
        subclasses such as DTensors, and what :func:`fastamp.cuda.graphed_step` replays.

        Args:
            named_parameters: As for :meth:`overflow_report`.

        Returns:
            A report that is false if nothing was counted yet; ``str`` of it is a table. Waits for
            the device.

        Raises:
            TypeError: ``named_parameters`` is not iterable.
        """
        names = names_by_identity(named_parameters, "underflow_report")
        found = self._core.underflows() if self._enabled else None
        return make_underflow_report(*(found or (_C.UnderflowReport(), [])), names)

    def history(self) -> list[StepRecord]:
        """Returns the last ``history_size`` iterations, oldest first.

        The device writes them in the kernel that updates the scale; reading them waits for it.
        Empty if the scaler is disabled, before the first iteration has ended, and on
        devices other than CPU and CUDA.
        """
        return [StepRecord(*row) for row in self._core.history()] if self._enabled else []

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs, best after :meth:`update`.

        Returns:
            torch's five entries, "scale", "growth_factor", "backoff_factor", "growth_interval" and
            "_growth_tracker" (floats and ints), and "min_scale", "max_scale", "hysteresis",
            "_hysteresis_tracker", "fast_growth_interval" and "_fast_growth_limit" if they are in
            use. If ``history_size`` was given, "history",
            "overflow_report" and "skipped_in_a_row" too (lists, numbers, strings). Empty if the
            scaler is disabled. Waits for the device.
        """
        state = super().state_dict()
        if not self._enabled:
            return state
        if self._min_scale is not None:
            state["min_scale"] = self._min_scale
        if self._max_scale is not None:
            state["max_scale"] = self._max_scale
        if self._hysteresis > 1:
            state["hysteresis"] = self._hysteresis
            state["_hysteresis_tracker"] = self._get_hysteresis_tracker()
        if self._fast_growth_interval > 0:
            state["fast_growth_interval"] = self._fast_growth_interval
            state["_fast_growth_limit"] = self._get_fast_growth_limit()
        state.update(self._past())
        return state

    def _past(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of past iterations, if that was asked for by name."""
        if "_history_size" not in self.__dict__:
            return {}
        report = self.overflow_report()
        return {
            "history": self._core.history(),
            "overflow_report": report.as_dict() if report else None,
            "skipped_in_a_row": self._core.skipped_in_a_row,
        }

    def _load_past(self, past: Past, scale: float) -> None:
        rows: list[Any] = list(past.history)
        self._core.load(float(scale), rows, past.skipped_in_a_row)
        self._loaded_report = past.report

    def _get_hysteresis_tracker(self) -> int:
        tracker = self._hysteresis_tracker
        return self._init_hysteresis_tracker if tracker is None else int(tracker.item())

    def _get_fast_growth_limit(self) -> float:
        limit = self._fast_growth_limit
        return self._init_fast_growth_limit if limit is None else float(limit.item())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state; does nothing if the scaler is disabled.

        Args:
            state_dict: What ``state_dict`` of this class or of ``torch.amp.GradScaler`` returned.
                Options it does not name keep their values.

        Raises:
            RuntimeError: The state is empty.
            KeyError: One of torch's five entries is missing. Nothing was changed.
            TypeError: An entry is not a number. Nothing was changed.
            ValueError: A bound, the hysteresis or the interval of fast growth is out of range, or
                the past is in no form that ``state_dict`` gives it. Nothing was changed.
        """
        if not self._enabled:
            return
        attributes = checked_state(
            state_dict,
            self._hysteresis,
            self._min_scale,
            self._max_scale,
            self._fast_growth_interval,
        )
        past = checked_past(state_dict)
        loaded = [
            (tensor, torch.empty_like(tensor).fill_(attributes[name]))
            for tensor, name in (
                (self._scale, "_init_scale"),
                (self._growth_tracker, "_init_growth_tracker"),
            )
            if tensor is not None
        ]
        self._load_past(past, attributes["_init_scale"])  # The last that can refuse something.
        self._is_new = False
        self.__dict__.update(attributes)
        for tensor, value in loaded:
            tensor.copy_(value)
        if self._scale is not None:
            self._make_extra_tensors(self._scale.device)

    def to_json(self) -> str:
        """Returns the state as one line of JSON, for programs that carry it without torch's files.

        Returns:
            The numbers of :meth:`state_dict` without the past, under "scale", "growth_factor",
            "backoff_factor", "growth_interval", "growth_tracker" and, if in use, "min_scale",
            "max_scale", "hysteresis", "hysteresis_tracker", "fast_growth_interval" and
            "fast_growth_limit"; "format", "version" and "enabled" say what they are. Numbers are
            read back without loss. Waits for the device.

        Raises:
            ValueError: A number is one that :meth:`from_json` refuses, such as a scale of NaN.
        """
        return json_of_state(self.state_dict())

    def load_json(self, text: str) -> None:
        """Continues from what :meth:`to_json` returned; does nothing if the scaler is disabled.

        Args:
            text: One JSON object, in any order of keys. Options it does not name keep their values.

        Raises:
            TypeError: ``text`` is no string.
            ValueError: It is no JSON object, of another format or version, lacks a key, has one
                that the version does not know or twice, a value of another type, or one out of its
                range. Nothing was changed.
            RuntimeError: It is of a disabled scaler.
        """
        state = state_of_json("load_json", text)
        self.load_state_dict(state)

    @classmethod
    def from_json(cls: type[_Scaler], text: str, device: str = "cuda", **options: Any) -> _Scaler:
        """Makes a scaler that continues from what :meth:`to_json` returned.

        Args:
            text: As for :meth:`load_json`; that of a disabled scaler gives a disabled one.
            device: As for the constructor.
            **options: Further arguments of the constructor, such as ``process_group``. What the
                text says goes before them.

        Raises:
            TypeError: ``text`` is no string.
            ValueError: As for :meth:`load_json`.
        """
        state = state_of_json("from_json", text)
        scaler = cls(device, **{"enabled": bool(state), **options})
        if state:
            scaler.load_state_dict(state)
        return scaler

    def register_on_skip(self, hook: SkipHook, *, wait: bool = False) -> RemovableHandle:
        """Calls a function for each skipped step of an optimizer, of iterations that end from now.

        It is called when the skip is known, on the thread that uses the scaler. On the CPU that is
        in the :meth:`update` that ends the iteration; on CUDA in the first :meth:`update`,
        :meth:`get_scale_async` or other question to the scaler that finds the answer there, usually
        the next :meth:`update`. Nothing waits for it. If one iteration skips the steps of several
        optimizers, there is a call for each.

        Args:
            hook: ``hook(optimizer, scale, record)``: the optimizer, or ``None`` if it is gone; the
                scale that overflowed; and the iteration's record as :meth:`history` has it. (With
                ``history_size=0``, the record's norm is NaN and its growth_tracker 0.) It may use
                the scaler; steps that it makes known come after it. What it raises comes out of
                the call on the scaler, whose work is done by then; hooks registered after it do not
                hear of that step.
            wait: Make :meth:`update` wait for the device, so that the hook is called before it
                returns.

        Returns:
            A handle with ``remove()``. Hooks are no part of states, copies and pickles.

        Raises:
            TypeError: ``hook`` is not callable, or ``wait`` is no bool.
        """
        return self._add_skip_hook("register_on_skip", "hook", hook, wait)

    def restore_on_skip(self, module: torch.nn.Module) -> RemovableHandle:
        """Puts running statistics back when an iteration skips a step.

        :meth:`fastamp.StepGuard.restore_on_skip` says what that is; here :meth:`update` does it, if
        any optimizer of the iteration is skipped. Does nothing if the scaler is disabled. No part
        of states, copies and pickles.

        Args:
            module: Whose norms are meant: the one that the program calls.

        Returns:
            A handle with ``remove()``.

        Raises:
            TypeError: It is no module.
            ValueError: It has no norm with running statistics.
        """
        if not hasattr(self, "_statistics"):
            self._statistics = RestoredStatistics()
        return self._statistics.add("restore_on_skip", module)

    def _add_skip_hook(self, function: str, argument: str, hook: Any, wait: Any) -> RemovableHandle:
        known = hasattr(self, "_skip_hooks")
        hooks = self._skip_hooks if known else SkipHooks()
        handle = hooks.add(function, argument, hook, wait)
        if not known:
            self._skip_hooks = hooks
            if hasattr(self, "_kept_core"):
                self._kept_core.notify_skips(weakly(self._notify_of_skip))
        return handle

    def _notify_of_skip(
        self, optimizer: Any, step: int, scale: float, norm: float, growth_tracker: int
    ) -> None:
        record = StepRecord(step, scale, True, norm, growth_tracker)
        self._skip_hooks.notify(optimizer, record)

    def _notify_of_iteration(self, capturing: bool = False) -> None:
        """Notifies users of what is known, at the end of an iteration that may have news."""
        hooks = getattr(self, "_skip_hooks", None)
        wait = hooks is not None and not capturing and hooks.wait()
        warn_of_overflows(self._core.poll(wait))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled and (past := self._past()):
            state["_saved_past"] = past
        if self._enabled and self._hysteresis > 1:
            state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
            state["_hysteresis_tracker"] = None
        if self._enabled and self._fast_growth_interval > 0:
            state["_init_fast_growth_limit"] = self._get_fast_growth_limit()
            state["_fast_growth_limit"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._is_new = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ScalerState:
        # A process group is a handle on something shared: copies speak over the same one.
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return clone


def keeps_history(scaler: Any) -> bool:
    """Whether a scaler or guard was made with a history."""
    size: int = scaler._history_size
    return size > 0


def core_of(scaler: ScalerState) -> _C.ScalerCore:
    """The native core of an enabled scaler, made now if it is not there yet."""
    return scaler._core


# What code needs that captures whole iterations in a CUDA graph and replays them, which
# fastamp.cuda.graphed_step does. Of enabled scalers only.


def captured_values(scaler: ScalerState) -> Any:
    """Returns what a captured step takes from a scaler for good.

    Values of its options, and identities of its tensors: a capture stands as long as they are
    equal.
    """
    tensors = (
        scaler._scale,
        scaler._growth_tracker,
        scaler._hysteresis_tracker,
        scaler._fast_growth_limit,
    )
    return (
        scaler._growth_factor,
        scaler._backoff_factor,
        scaler._growth_interval,
        scaler._hysteresis,
        scaler._min_scale,
        scaler._max_scale,
        scaler._fast_growth_interval,
        scaler._keep_scaled_grads,
        scaler._history_size,
        *(id(tensor) for tensor in tensors),
    )


def prepare_replay(scaler: ScalerState, device: torch.device) -> None:
    """Makes, on a device, all that a captured step must find, and 1 / scale right, which it reads.

    Before the capture, since what is made in it would be made anew by each replay; and before each
    replay, since the scale may have been set.
    """
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    scale, _ = scaler._check_scale_growth_tracker("graphed_step")
    scaler._core.prepare(scale)


def note_replay(scaler: ScalerState, captured: _C.CapturedOutcomes) -> None:
    """Counts the edits that a replay made, and starts reading back its outcome."""
    scaler._expect_scale("graphed_step")
    if scaler._core.note_replay(scaler, captured):
        scaler._notify_of_iteration()


def lend_counters(lender: ScalerState, scaler: ScalerState) -> None:
    """Makes a scaler count inf and NaN where another one does, which then finds counters made."""
    scaler._kept_core = _C.ScalerCore(float(scaler._init_scale), lender._core)
    scaler._times_scaled, scaler._loaded_report = 0, None


def unscale_once(scaler: ScalerState, optimizer: torch.optim.Optimizer) -> None:
    """Unscales the gradients of an optimizer unless that was done."""
    if scaler._stage_of(optimizer) is OptState.READY:
        scaler.unscale_(optimizer)
