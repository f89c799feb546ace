"""What a gradient scaler does around the capture and the replays of a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import fastamp._C as _C

if TYPE_CHECKING:
    from fastamp._scaler_records import Captured
    from fastamp.grad_scaler import GradScaler

_CONSTANTS = (
    "_growth_factor",
    "_backoff_factor",
    "_growth_interval",
    "_hysteresis",
    "_min_scale",
    "_max_scale",
    "_keep_scaled_grads",
    "_history_size",
)


def capture_key(scaler: GradScaler) -> Any:
    """Returns what a captured step takes from a scaler for good: options and tensors."""
    if not scaler.is_enabled():
        return None
    tensors = (scaler._scale, scaler._growth_tracker, scaler._hysteresis_tracker)
    return [getattr(scaler, name) for name in _CONSTANTS], [id(tensor) for tensor in tensors]


def prepare(scaler: GradScaler, device: torch.device) -> None:
    """Makes all that a captured step must find: made during capture, a replay would reset it."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    scale, _ = scaler._check_scale_growth_tracker("graphed_step")
    scaler._notes.ring_on(scale.device, scaler._history_size)
    scaler._notes.inverse_on(scale.device)
    refresh_inverse(scaler)


def refresh_inverse(scaler: GradScaler) -> None:
    """Makes 1 / scale right, which the graph reads, if somebody wrote the scale."""
    scale, _ = scaler._check_scale_growth_tracker("graphed_step")
    notes = scaler._notes
    inverse = notes.inverse
    if inverse is not None and notes.inv_scale_of(scale) is not inverse:
        inverse.copy_(_C.inverse_scale(scale))
        notes.note_inverse(scale)


def take_captured(scaler: GradScaler) -> Captured:
    """Returns what the update that was just captured will leave at each replay."""
    captured = scaler._notes.captured
    assert captured is not None
    scaler._notes.captured = None
    return captured


def after_replay(scaler: GradScaler, captured: Captured) -> None:
    """Counts the edits that a replay made, and starts reading back its outcome."""
    scale, tracker = scaler._check_scale_growth_tracker("graphed_step")
    torch.autograd.graph.increment_version([scale, tracker])
    scaler._notes.note_inverse(scale)
    scaler._notes.replayed(captured)
