"""The gradient scaler: torch.amp.GradScaler with the work on tensors done in C++."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from fastamp._scaler_checks import (
    check_bound,
    check_extras,
    check_factors,
    check_step_options,
    cuda_is_missing,
)
from fastamp._scaler_clip import ClippingScaler
from fastamp._scaler_gated import fuse_once, goes_through_gate, step_through_gate
from fastamp._scaler_queries import AnsweringScaler
from fastamp._scaler_steps import (
    checked_scale,
    move_scale,
    scale_each,
    step_with_flags,
    update_on_host,
)
from fastamp._trace.scalers import note_scaler

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["GradScaler", "OptState"]


class GradScaler(ClippingScaler, AnsweringScaler):
    """Scales losses so that fp16 gradients do not underflow, and skips steps that overflowed.

    One iteration is ``scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()``. A
    drop-in replacement for ``torch.amp.GradScaler`` (torch 2.11): same results bit for bit, same
    exceptions and warnings, same state, private attributes included. What differs is listed in
    docs/scaler.md. Not thread-safe; different scalers are independent.

    Args:
        device: Kind of device that holds the scale, "cuda" or "cpu". Without a CUDA device, "cuda"
            warns and disables the scaler, as torch does.
        init_scale: First scale (dimensionless).
        growth_factor: Factor of the scale after ``growth_interval`` clean iterations in a row;
            above 1.
        backoff_factor: Factor of the scale after an iteration with an overflow; below 1.
        growth_interval: Clean iterations between two growths.
        enabled: A disabled scaler passes everything through.
        min_scale: Lower bound kept by ``update``; above 0. ``None``: no bound, as torch.
        max_scale: Upper bound kept by ``update``; at least ``min_scale``. ``None``: no bound.
        hysteresis: Overflows in a row that it takes to lower the scale; steps are skipped at each.
            1, as torch: the first one lowers it.
        process_group: Overflows are agreed on over this group (one MAX all-reduce per optimizer and
            iteration, which every member must reach): if one rank overflows, all skip. ``None``:
            no communication.
        fuse: Carry every ``torch.optim.SGD``, ``Adam`` and ``AdamW`` that is stepped by
            ``fastamp.optim.fuse_`` from then on.
        keep_scaled_grads: Leave gradients as ``backward`` made them where the optimizer's step
            unscales and clips them itself (``fastamp.optim``, ``fuse``), instead of writing them
            back as torch does; saves 4 bytes of traffic per fp32 gradient.
        history_size: Iterations kept for :meth:`history`, at least 0. If given, past steps are part
            of :meth:`state_dict` too; by default 128 are kept and none saved.

    Raises:
        AssertionError: ``growth_factor`` <= 1 or ``backoff_factor`` >= 1, when enabled.
        TypeError: An argument after ``enabled`` has a wrong type.
        ValueError: ``min_scale``, ``max_scale`` or ``hysteresis`` is out of range, or
            ``init_scale`` is outside the bounds.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        process_group: ProcessGroup | None = None,
        fuse: bool = False,
        keep_scaled_grads: bool = False,
        history_size: int | None = None,
    ) -> None:
        """Checks and keeps the options; nothing is created on a device yet."""
        extras = check_extras("GradScaler", min_scale, max_scale, hysteresis)
        extras |= check_step_options("GradScaler", fuse, keep_scaled_grads, history_size)
        self._device = device
        self._enabled = enabled
        if enabled and device == "cuda" and cuda_is_missing():
            text = (
                "expected a CUDA device for device='cuda', but CUDA is not available.  Disabling."
            )
            warnings.warn(f"GradScaler: {text}", stacklevel=2)
            self._enabled = False
        note_scaler(self)
        if not self._enabled:
            return
        check_factors("GradScaler", growth_factor, backoff_factor)
        check_bound("GradScaler", "init_scale", init_scale, min_scale, max_scale)
        self._init_scale = init_scale
        self._scale: Tensor | None = None
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        self._growth_tracker: Tensor | None = None
        self._per_optimizer_states: defaultdict[int, dict[str, Any]] = defaultdict(
            _refresh_per_optimizer_state
        )
        self.__dict__.update(extras)
        if process_group is not None:
            self.process_group = process_group

    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Any:
        """Multiplies outputs by the scale.

        Args:
            outputs: A tensor of any shape and floating dtype, or an iterable of such, nested at
                will. The first tensor ever scaled decides where the scale lives.

        Returns:
            ``outputs * scale``, differentiable; a list or tuple comes back as its type, another
            iterable as a lazy iterator. ``outputs`` itself if the scaler is disabled.

        Raises:
            ValueError: An element is neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        self._mark = object()
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale_on(outputs.device)
        return scale_each(self, outputs, {})

    def _scale_on(self, device: torch.device) -> Any:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        scale: Any = self._scale
        return scale if scale.device == device else scale.to(device=device, non_blocking=True)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscales the gradients unless that was done, and steps if all of them are finite.

        ``optimizer.step`` is called if and only if no gradient is inf or NaN; that reads one flag
        per device from it. Optimizers with ``_step_supports_amp_scaling`` decide for themselves,
        without a read, from the attributes ``grad_scale`` and ``found_inf`` set for the call.

        Args:
            optimizer: The optimizer that applies the gradients.
            *args: Passed on to ``optimizer.step``.
            **kwargs: Passed on to ``optimizer.step``; ``closure`` is not supported.

        Returns:
            What ``optimizer.step`` returned, or ``None`` if it was skipped.

        Raises:
            AssertionError: :meth:`scale` was never called, or no parameter has a gradient.
            RuntimeError: Called twice since the last :meth:`update`, or with ``closure``.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError(
                "step: expected no closure, got one: "
                "Closure use is not currently supported if GradScaler is enabled."
            )
        self._check_scale_growth_tracker("step")
        stage = self._stage_of(optimizer)
        if stage is OptState.STEPPED:
            raise RuntimeError(
                "step: expected one call per optimizer and iteration, got a second one: "
                "step() has already been called since the last update()."
            )
        if stage is OptState.UNSCALED:
            self._warn_if_scaled_anew("step", optimizer)
        if self._fuse:
            fuse_once(self, optimizer)
        if goes_through_gate(self, optimizer, args):
            return step_through_gate(self, optimizer, args, kwargs)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return step_with_flags(self, optimizer, stage, args, kwargs)
        if stage is OptState.READY:
            self.unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if len(state["found_inf_per_device"]) == 0:
            if stage is OptState.READY:  # A refused call takes its own unscale_ back.
                del self._per_optimizer_states[id(optimizer)]
            raise AssertionError(
                "step: expected an optimizer with at least one gradient, got none: "
                "No inf checks were recorded for this optimizer."
            )
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends an iteration: moves the scale by what the iteration's gradients showed.

        Without an argument: lower by ``backoff_factor`` after an overflow, raise by
        ``growth_factor`` after ``growth_interval`` clean iterations in a row. No host
        synchronisation.

        Args:
            new_scale: The scale to use from now on: a float, or a tensor of no dimensions on a
                device of the scaler's kind. Its value is copied; the growth count goes on. This
                ends an iteration if an optimizer was unscaled or stepped in it, and is none
                otherwise.

        Raises:
            AssertionError: No gradients were checked since the last update, or ``new_scale`` is a
                tensor on another kind of device, of another size, or that requires grad.
            AttributeError: ``new_scale`` is neither a float nor a tensor.
            RuntimeError: ``new_scale`` has one element and dimensions, such as shape [1], as torch.
            ValueError: ``new_scale`` is a float outside ``min_scale`` .. ``max_scale``. (A tensor
                is not read; the bounds apply to it at the next update.)
        """
        if not self._enabled:
            return
        if new_scale is None and update_on_host(self):
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        wanted = None if new_scale is None else checked_scale(self, scale, new_scale)
        flags = [
            flag
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if flags:
            move_scale(self, scale, growth_tracker, flags, wanted)
        elif wanted is not None:
            scale.copy_(wanted)
        else:
            raise AssertionError(
                "update: expected unscale_() or step() on an optimizer with gradients before "
                "it, got neither: No inf checks were recorded prior to update."
            )
        # A stream that is captured runs later: nothing can be read back now.
        if scale.is_cuda and torch.cuda.is_current_stream_capturing():
            self._notes.keep_for_replays(scale, self._per_optimizer_states)
        else:
            self._notes.end_iteration(scale, self._per_optimizer_states, bool(flags))
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
