# SPDX-License-Identifier: Apache-2.0
"""What a gradient scaler remembers and tells: checkpoints, copies, past iterations."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState

import fastamp._C as _C
from fastamp._modes import ordinary_tensors
from fastamp._scaler.checks import Past, checked_past, checked_state
from fastamp._scaler.hooks import CoreHooks
from fastamp._scaler.replay_port import ReplayPort
from fastamp._scaler.reports import (
    OverflowReport,
    StepRecord,
    make_report,
    names_by_identity,
    warn_of_overflows,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


def _overflowed(state: dict[str, Any]) -> bool:
    # sync: the iteration is not over, so its flags are not on their way yet
    return any(flag.item() != 0.0 for flag in state["found_inf_per_device"].values())


class ScalerState(TorchGradScaler):
    """The half of ``fastamp.GradScaler`` that remembers; the other one acts."""

    # Instances carry these names only when they are in use: by default an instance's __dict__ is
    # exactly torch's, so state and pickles go both ways.
    _min_scale: float | None = None
    _max_scale: float | None = None
    _hysteresis: int = 1
    _init_hysteresis_tracker: int = 1
    _hysteresis_tracker: Tensor | None = None
    process_group: ProcessGroup | None = None
    _fuse: bool = False
    _keep_scaled_grads: bool = False
    _history_size: int = 128
    # Slots, and so not in __dict__ either. All are there once _core was asked for.
    __slots__ = ("_kept_core", "_loaded_report", "_times_scaled")
    _kept_core: _C.ScalerCore
    _loaded_report: OverflowReport | None
    _times_scaled: int  # Calls of scale(): in between, gradients may have come that are scaled.

    @property
    def _core(self) -> _C.ScalerCore:
        try:
            return self._kept_core
        except AttributeError:  # A new scaler, or one that was copied or unpickled.
            self._times_scaled = getattr(self, "_times_scaled", 0)
            self._kept_core = _C.ScalerCore(
                float(self._init_scale), self._history_size, self._device, self._new_hooks()
            )
            self._load_past(checked_past(self.__dict__.pop("_saved_past", {})))
            return self._kept_core

    def _new_hooks(self) -> CoreHooks:
        return CoreHooks(self, self._move_state)

    def _move_state(self, key: int, free: int) -> None:
        if self._enabled and key in self._per_optimizer_states:
            self._per_optimizer_states[free] = self._per_optimizer_states.pop(key)

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        with ordinary_tensors():
            super()._lazy_init_scale_growth_tracker(dev)
            if self._hysteresis > 1:
                self._hysteresis_tracker = torch.full(
                    (), self._init_hysteresis_tracker, dtype=torch.int32, device=dev
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
        states = self._per_optimizer_states.values()
        stepped = [state for state in states if state["stage"] is OptState.STEPPED]
        if stepped:
            return any(_overflowed(state) for state in stepped)
        return self._settled().skipped

    def step_was_skipped_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tells :attr:`step_was_skipped` for one optimizer's last step."""
        if not self._enabled:
            return False
        core = self._settled()
        state = self._per_optimizer_states.get(id(optimizer))
        if state is not None and state["stage"] is OptState.STEPPED:
            return _overflowed(state)
        return core.was_skipped(optimizer)

    def _settled(self) -> _C.ScalerCore:
        """Returns the core when it knows what all iterations have done; waits for the device."""
        warn_of_overflows(self._core.settle(True))
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
        warn_of_overflows(self._core.settle(False))
        return self._core.scale

    def overflow_report(self, named_parameters: Any = None) -> OverflowReport:
        """Tells which gradients were inf or NaN at the last skipped step.

        Counting costs nothing while gradients are finite. Gradients of DTensors are counted on
        their own shard; gradients of other tensor subclasses are not counted.

        Args:
            named_parameters: Where names come from: ``model.named_parameters()`` or the model. Else
                they are the optimizer's ``param_names``, or positions.

        Returns:
            A report that is false if no step was skipped; ``str`` of it is a table. Waits for the
            device only if there was an overflow or the last iteration's outcome is not known yet.

        Raises:
            TypeError: ``named_parameters`` is not iterable.
        """
        names = names_by_identity(named_parameters)
        if not self._enabled:
            return OverflowReport()
        core = self._settled()
        now = [key for key, state in self._per_optimizer_states.items() if _overflowed(state)]
        found = core.overflow(now)
        if found is None:
            return self._loaded_report or OverflowReport()
        return make_report(*found, names)

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
            "_growth_tracker" (floats and ints), and "min_scale", "max_scale", "hysteresis" and
            "_hysteresis_tracker" if they are in use. If ``history_size`` was given, "history",
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

    def _load_past(self, past: Past) -> None:
        rows: list[Any] = list(past.history)
        self._core.load(float(self._init_scale), rows, past.skipped_in_a_row)
        self._loaded_report = past.report

    def _get_hysteresis_tracker(self) -> int:
        tracker = self._hysteresis_tracker
        return self._init_hysteresis_tracker if tracker is None else int(tracker.item())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state; does nothing if the scaler is disabled.

        Args:
            state_dict: What ``state_dict`` of this class or of ``torch.amp.GradScaler`` returned.
                Options it does not name keep their values.

        Raises:
            RuntimeError: The state is empty.
            KeyError: One of torch's five entries is missing. Nothing was changed.
            TypeError: An entry is not a number. Nothing was changed.
            ValueError: A bound or the hysteresis is out of range. Nothing was changed.
        """
        if not self._enabled:
            return
        attributes = checked_state(state_dict, self._hysteresis, self._min_scale, self._max_scale)
        past = checked_past(state_dict)
        self.__dict__.update(attributes)
        for tensor, value in (
            (self._scale, self._init_scale),
            (self._growth_tracker, self._init_growth_tracker),
        ):
            if tensor is not None:
                tensor.fill_(value)
        self._load_past(past)
        if self._hysteresis > 1 and self._scale is not None:
            self._hysteresis_tracker = torch.full(
                (), self._init_hysteresis_tracker, dtype=torch.int32, device=self._scale.device
            )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled and (past := self._past()):
            state["_saved_past"] = past
        if self._enabled and self._hysteresis > 1:
            state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
            state["_hysteresis_tracker"] = None
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> ScalerState:
        # A process group is a handle on something shared: copies speak over the same one.
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return clone

    def replay_port(self) -> ReplayPort:
        """Returns what code needs that captures whole iterations in a CUDA graph and replays them.

        :func:`fastamp.graphed_step` is such code. Of an enabled scaler only.
        """
        return ReplayPort(
            constants=self._captured_values,
            prepare=self._prepare_replay,
            end_capture=self._core.take_captured,
            note_replay=self._note_replay,
            lend_counters=self._lend_counters,
            unscale_once=self._unscale_once,
        )

    def _captured_values(self) -> Any:
        tensors = (self._scale, self._growth_tracker, self._hysteresis_tracker)
        return (
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
            self._hysteresis,
            self._min_scale,
            self._max_scale,
            self._keep_scaled_grads,
            self._history_size,
            *(id(tensor) for tensor in tensors),
        )

    def _prepare_replay(self, device: torch.device) -> None:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        scale, _ = self._check_scale_growth_tracker("graphed_step")
        self._core.prepare(scale)

    def _note_replay(self, captured: _C.CapturedOutcomes) -> None:
        scale, growth_tracker = self._check_scale_growth_tracker("graphed_step")
        warn_of_overflows(
            self._core.note_replay(scale, growth_tracker, self._hysteresis_tracker, captured)
        )

    def _lend_counters(self, scaler: ScalerState) -> None:
        scaler._kept_core = _C.ScalerCore(
            float(scaler._init_scale), self._core, scaler._new_hooks()
        )
        scaler._times_scaled, scaler._loaded_report = 0, None

    def _unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        state = self._per_optimizer_states.get(id(optimizer))
        if state is None or state["stage"] is OptState.READY:
            self.unscale_(optimizer)
