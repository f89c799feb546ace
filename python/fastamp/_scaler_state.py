"""What a gradient scaler remembers: its tensors, checkpoints, pickles and copies."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from fastamp._modes import ordinary_tensors
from fastamp._scaler_checks import check_extras
from fastamp._scaler_history import DEFAULT_SIZE
from fastamp._scaler_notes import Notes, checked_notes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from fastamp._scaler_report import OverflowReport


def _number(state: Mapping[str, Any], key: str) -> Any:
    value = state[key]
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(
            f'load_state_dict: expected state_dict["{key}"] to be a number, '
            f"got {type(value).__name__}"
        )
    return value


def checked_state(scaler: ScalerState, state: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a state_dict completely before anything is changed.

    Returns:
        The attributes that the scaler takes from it.
    """
    if len(state) == 0:
        raise RuntimeError(
            "load_state_dict: expected the state of an enabled scaler, got an empty one: "
            "The source state dict is empty, possibly because it was saved "
            "from a disabled instance of GradScaler."
        )
    attributes = {
        "_init_scale": _number(state, "scale"),
        "_growth_factor": _number(state, "growth_factor"),
        "_backoff_factor": _number(state, "backoff_factor"),
        "_growth_interval": _number(state, "growth_interval"),
        "_init_growth_tracker": _number(state, "_growth_tracker"),
    }
    hysteresis = state.get("hysteresis", scaler._hysteresis)
    attributes |= {"_hysteresis": 1} if hysteresis != scaler._hysteresis else {}
    attributes |= check_extras(
        "load_state_dict",
        state.get("min_scale", scaler._min_scale),
        state.get("max_scale", scaler._max_scale),
        hysteresis,
    )
    if hysteresis > 1:
        tracker = state.get("_hysteresis_tracker", hysteresis)
        if isinstance(tracker, bool) or not isinstance(tracker, int) or tracker < 0:
            raise ValueError(
                'load_state_dict: expected state_dict["_hysteresis_tracker"] to be an int >= 0, '
                f"got {tracker!r}"
            )
        attributes["_init_hysteresis_tracker"] = tracker
    return attributes


class ScalerState(TorchGradScaler):
    """The base of the scaler that holds its state; see ``fastamp.GradScaler``."""

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
    _history_size: int = DEFAULT_SIZE
    # Slots, and so not in __dict__ either.
    __slots__ = ("_kept_notes", "_mark")
    _kept_notes: Notes
    _mark: object  # Another one after each scale(): see OptimizerRecord.mark.

    if TYPE_CHECKING:

        def overflow_report(self, named_parameters: Any = None) -> OverflowReport: ...

    @property
    def _notes(self) -> Notes:
        try:
            return self._kept_notes
        except AttributeError:
            notes = self._kept_notes = Notes(self._init_scale)
            saved = self.__dict__.pop("_saved_notes", {})
            notes.load(checked_notes(saved, self._history_size))
            return notes

    def _saves_notes(self) -> bool:
        return "_history_size" in self.__dict__  # Asked for by name; see state_dict.

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        with ordinary_tensors():
            super()._lazy_init_scale_growth_tracker(dev)
            if self._hysteresis > 1:
                self._hysteresis_tracker = torch.full(
                    (), self._init_hysteresis_tracker, dtype=torch.int32, device=dev
                )

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
        if self._saves_notes():
            state.update(self._notes.state(self.overflow_report()))
        return state

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
        attributes = checked_state(self, state_dict)
        notes = checked_notes(state_dict, self._history_size)
        self.__dict__.update(attributes)
        for tensor, value in (
            (self._scale, self._init_scale),
            (self._growth_tracker, self._init_growth_tracker),
        ):
            if tensor is not None:
                tensor.fill_(value)
        self._notes.scale = float(self._init_scale)
        self._notes.load(notes)
        if self._hysteresis > 1 and self._scale is not None:
            self._hysteresis_tracker = torch.full(
                (), self._init_hysteresis_tracker, dtype=torch.int32, device=self._scale.device
            )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled and self._saves_notes():
            state["_saved_notes"] = self._notes.state(self.overflow_report())
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
