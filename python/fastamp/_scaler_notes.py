"""What a gradient scaler knows about its steps, read back without waiting for them."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fastamp._C as _C
from fastamp._modes import ordinary_tensors
from fastamp._scaler_history import HistoryRing, checked_records
from fastamp._scaler_records import Captured, Iteration, OptimizerRecord, Outcome
from fastamp._scaler_report import OverflowReport, StepRecord, report_from_dict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

SKIPS_BEFORE_WARNING = 20

Seen = tuple[OptimizerRecord, list["Tensor"]]  # flags


def _with_counts(seen: list[Seen]) -> list[Outcome]:
    return [(record, flags, record.counts()) for record, flags in seen]


def checked_notes(state: Mapping[str, Any], history_size: int) -> dict[str, Any]:
    """Reads what a checkpoint says about past steps; of the history what there is room for.

    Raises:
        ValueError: It does not have the form that :meth:`Notes.state` gives it.
    """
    if not any(key in state for key in ("history", "overflow_report", "skipped_in_a_row")):
        return {}
    report = state.get("overflow_report")
    skips = state.get("skipped_in_a_row", 0)
    if not isinstance(skips, int) or skips < 0:
        raise ValueError(
            'load_state_dict: expected state_dict["skipped_in_a_row"] to be an int >= 0, '
            f"got {skips!r}"
        )
    history = checked_records(state.get("history", []))
    return {
        "history": history[max(0, len(history) - history_size) :],
        "overflow_report": None if report is None else report_from_dict(report),
        "skipped_in_a_row": skips,
    }


def caller_level() -> int:
    """Returns the stacklevel of the user's frame: a warning names the line that called us."""
    package = str(Path(__file__).parent)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    return level


class Notes:
    """The host's knowledge of past steps, at most one step behind the device. Not thread-safe."""

    def __init__(self, scale: float) -> None:
        """Starts with nothing known but the first scale."""
        self.records: dict[int, OptimizerRecord] = {}
        self.gone: list[int] = []  # Keys of records whose optimizers are.
        self.pending: deque[Iteration] = deque()
        self.iterations = 0
        self.scale = scale
        self.skipped = False
        self.skipped_in_a_row = 0
        self.warned = False
        self.overflow: tuple[int, float, list[tuple[OptimizerRecord, list[Any]]]] | None = None
        self.loaded_report: OverflowReport | None = None
        self.captured: Captured | None = None
        self.inverse: Tensor | None = None
        self.inverse_of: tuple[Tensor, int] | None = None
        self.fresh_flag: Tensor | None = None
        self.ring: HistoryRing | None = None
        self.prepared_for: Tensor | None = None
        self.loaded_history: list[StepRecord] = []

    def record_of(self, optimizer: Any) -> OptimizerRecord:
        """Returns the record of an optimizer, a new one if it has none yet."""
        key = id(optimizer)
        record = self.records.get(key)
        if record is None or record.optimizer() is not optimizer:
            record = OptimizerRecord(optimizer, lambda ref: self._let_go(key, ref))
            self.records[key] = record
        return record

    def _let_go(self, key: int, optimizer: Any) -> None:
        """An optimizer is gone. What it did still counts until its iteration ends."""
        record = self.records.get(key)
        if record is not None and record.optimizer is optimizer:
            self.gone.append(key)
            if record.gradient_pass is not None:
                record.gradient_pass.forget()

    def set_aside(self, key: int, states: dict[int, dict[str, Any]]) -> None:
        """Makes room for an optimizer at the address of one that is gone in the same iteration."""
        free = -key  # No optimizer has a negative address.
        while free in states:
            free -= 1
        states[free] = states.pop(key)
        self.records[free] = self.records.pop(key)
        self.gone.append(free)

    def _forget_gone(self) -> None:
        while self.gone:
            key = self.gone.pop()
            record = self.records.get(key)
            if record is not None and record.optimizer() is None:
                del self.records[key]

    def inverse_on(self, device: torch.device) -> Tensor | None:
        """Returns the tensor that the update operator writes 1 / scale to, on CUDA.

        On the CPU, a division costs less than keeping its result.
        """
        if device.type != "cuda":
            return None
        if self.inverse is None or self.inverse.device != device:
            self.inverse = torch.empty((), dtype=torch.float32, device=device)
        return self.inverse

    def note_inverse(self, scale: Tensor) -> None:
        """Notes that the update operator has written 1 / scale."""
        self.inverse_of = (scale, scale._version)

    def inv_scale_of(self, scale: Tensor) -> Tensor:
        """Returns 1 / scale, without a launch unless somebody else wrote the scale."""
        known = self.inverse_of
        if (
            self.inverse is not None
            and known is not None
            and known[0] is scale
            and known[1] == scale._version
        ):
            return self.inverse
        return _C.inverse_scale(scale)

    def prepare(self, scale: Tensor, size: int) -> None:
        """Makes what the update operator writes to beside a scale; looked at once per scale."""
        with ordinary_tensors():  # As the scale was made.
            ring, inverse = self.ring_on(scale.device, size), self.inverse_on(scale.device)
        self.ring, self.inverse = ring, inverse
        self.prepared_for = scale

    def ring_on(self, device: torch.device, size: int) -> HistoryRing | None:
        """Returns the ring on a device, made at first use; ``None`` where there can be none."""
        if self.ring is not None and self.ring.rows.device == device:
            return self.ring
        if size == 0 or device.type not in ("cpu", "cuda"):
            return None
        self.ring = HistoryRing(size, device)
        self.ring.load(self.loaded_history)
        return self.ring

    def history(self) -> list[StepRecord]:
        """Returns the iterations that are kept; waits for the device."""
        return self.loaded_history if self.ring is None else self.ring.read()

    def state(self, report: OverflowReport) -> dict[str, Any]:
        """Returns what a checkpoint keeps of past steps, as plain data; ``report`` is the last."""
        return {
            "history": [tuple(record) for record in self.history()],
            "overflow_report": report.as_dict() if report else None,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes over what :func:`checked_notes` returned, or forgets everything for ``{}``."""
        self.settle(wait=True)
        self.loaded_history = state.get("history", [])
        self.loaded_report = state.get("overflow_report")
        self.skipped_in_a_row = state.get("skipped_in_a_row", 0)
        self.iterations = self.loaded_history[-1].step + 1 if self.loaded_history else 0
        self.overflow = None
        self.skipped = False
        if self.ring is not None:
            self.ring.load(self.loaded_history)

    def norm(self, states: dict[int, dict[str, Any]]) -> Tensor | None:
        """Returns the norm over all optimizers of an iteration; ``None`` if one's is not known."""
        norms = []
        for key in states:
            record = self.records.get(key)
            norm = None if record is None else record.unscaled_norm()
            if norm is None:
                return None
            norms.append(norm)
        if len(norms) == 1:
            norm = norms[0]
            return norm if norm.dtype is torch.float32 else norm.float()
        home = norms[0].device
        together: Tensor = torch.linalg.vector_norm(
            torch.stack([norm.float().to(home) for norm in norms])
        )
        return together

    def end_iteration(
        self, scale: Tensor, states: dict[int, dict[str, Any]], counted: bool
    ) -> None:
        """Starts reading back what an iteration did and drops what belongs to it alone.

        Args:
            scale: As it is now.
            states: What the optimizers did.
            counted: Whether it was an iteration, with a row in the history. If not, only the scale
                is new.
        """
        seen = self._seen(states)
        scalars = [scale, *(flag for _, flags in seen for flag in flags)]
        values = None if self.pending else _C.host_values(scalars)
        if values is None:
            self._expect(scale, _with_counts(seen), counted)
        else:  # The host knows already.
            outcomes = [(record, len(flags), None) for record, flags in seen]
            self._take_in(self.iterations, values, outcomes)
            self.iterations += counted
        self._start_iteration()

    def take_in_now(self, record: OptimizerRecord, scale: float, overflow: bool) -> None:
        """Ends an iteration of one optimizer whose outcome the host knows."""
        if overflow:
            self._take_in(self.iterations, [scale, 1.0], [(record, 1, None)])
            record.start_iteration()
        else:
            self.scale = scale
            self.skipped = record.skipped = False
            self.skipped_in_a_row = 0
            # Nothing else can be set: see norm_is_that_of_its_pass().
            record.inv_scale = record.clip_coef = record.clip_value = record.mark = None
        self.iterations += 1
        if self.gone:
            self._forget_gone()

    def _seen(self, states: dict[int, dict[str, Any]]) -> list[Seen]:
        seen = []
        for key, state in states.items():
            record = self.records.get(key)
            flags = list(state["found_inf_per_device"].values())
            if record is not None and flags:
                seen.append((record, flags))
        return seen

    def _expect(self, scale: Tensor, seen: list[Outcome], counted: bool) -> None:
        self.pending.append(Iteration(self.iterations, scale, seen))
        self.iterations += counted
        self.settle(wait=False)

    def _start_iteration(self) -> None:
        self._forget_gone()
        for record in list(self.records.values()):  # Gradients that go may take optimizers along.
            record.start_iteration()

    def keep_for_replays(self, scale: Tensor, states: dict[int, dict[str, Any]]) -> None:
        """Ends an iteration that is being captured: each replay has its outcome to read back."""
        self.captured = (scale, _with_counts(self._seen(states)))
        self._start_iteration()

    def replayed(self, captured: Captured) -> None:
        """Starts reading back what a replay did."""
        self._expect(*captured, counted=True)

    def settle(self, *, wait: bool) -> None:
        """Takes in the iterations whose values have arrived, or waits for all of them."""
        while self.pending and (wait or self.pending[0].readback.ready()):
            iteration = self.pending.popleft()
            values = iteration.readback.values()
            self._take_in(iteration.number, values, iteration.optimizers)

    def _take_in(self, number: int, values: list[float], optimizers: list[Any]) -> None:
        """Takes in an iteration: scale and flags, and (record, number of flags, counts) of each."""
        scale, *flags = values
        before, self.scale = self.scale, scale
        start = 0
        overflowed = []
        for record, count, counts in optimizers:
            # NaN is not 0 either: any non-zero flag is an overflow.
            record.skipped = any(flag != 0.0 for flag in flags[start : start + count])
            start += count
            if record.skipped:
                overflowed.append((record, record.counts() if counts is None else counts))
        if optimizers:
            self.skipped = bool(overflowed)
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if overflowed else 0
        if overflowed:
            self.overflow = (number, before, overflowed)
            self._warn(before, scale)

    def _warn(self, before: float, scale: float) -> None:
        if self.warned:
            return
        if scale < 1.0 <= before:
            what = f"the loss scale fell below 1 (to {scale:g})"
        elif self.skipped_in_a_row >= SKIPS_BEFORE_WARNING:
            what = f"{self.skipped_in_a_row} steps in a row were skipped"
        else:
            return
        self.warned = True
        warnings.warn(
            f"GradScaler: {what}, so gradients are inf or NaN for a reason that a smaller scale "
            "does not cure. Look at scaler.overflow_report(model.named_parameters()) for the "
            "parameters concerned, at the loss and the inputs of that step for NaN, and at "
            "scaler.history() for when it began; a learning rate that is too high, a division by "
            "zero and a log or sqrt of zero are common causes.",
            stacklevel=caller_level(),
        )
