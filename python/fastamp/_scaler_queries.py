"""What a gradient scaler tells about its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastamp._scaler_report import (
    OverflowReport,
    StepRecord,
    make_report,
    names_by_identity,
    was_stepped,
)
from fastamp._scaler_state import ScalerState

if TYPE_CHECKING:
    import torch


def _overflowed(state: dict[str, Any]) -> bool:
    # sync: the iteration is not over, so its flags are not on their way yet
    return any(flag.item() != 0.0 for flag in state["found_inf_per_device"].values())


class AnsweringScaler(ScalerState):
    """The part of ``fastamp.GradScaler`` that answers questions."""

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
        stepped = [state for state in self._per_optimizer_states.values() if was_stepped(state)]
        if stepped:
            return any(_overflowed(state) for state in stepped)
        self._notes.settle(wait=True)
        return self._notes.skipped

    def step_was_skipped_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tells :attr:`step_was_skipped` for one optimizer's last step."""
        if not self._enabled:
            return False
        self._notes.settle(wait=True)
        state = self._per_optimizer_states.get(id(optimizer))
        record = self._notes.records.get(id(optimizer))
        if record is not None and record.optimizer() is not optimizer:
            return False  # Of one that is gone.
        if state is not None and was_stepped(state):
            return _overflowed(state)
        return record is not None and record.skipped

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
        self._notes.settle(wait=False)
        return self._notes.scale

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
        notes = self._notes
        notes.settle(wait=True)
        now = [
            (notes.records[key], notes.records[key].counts())
            for key, state in self._per_optimizer_states.items()
            if key in notes.records and _overflowed(state)
        ]
        if now:
            return make_report(notes.iterations, notes.scale, now, names)
        if notes.overflow is not None:
            return make_report(*notes.overflow, names)
        return notes.loaded_report or OverflowReport()

    def history(self) -> list[StepRecord]:
        """Returns the last ``history_size`` iterations, oldest first.

        The device writes them in the kernel that updates the scale; reading them waits for it.
        Empty if the scaler is disabled, before the first iteration has ended, and on
        devices other than CPU and CUDA.
        """
        return self._notes.history() if self._enabled else []
