"""Unscaling through a gradient scaler, by torch's protocol."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

import fastamp._C as _C
from fastamp._scaler_notes import caller_level
from fastamp._scaler_state import ScalerState
from fastamp._scaler_steps import agree_on_flags
from fastamp._scaler_subclasses import unscale_subclasses

if TYPE_CHECKING:
    from torch import Tensor

    from fastamp._scaler_records import OptimizerRecord


_UNSCALED = OptState.UNSCALED  # An attribute of an Enum takes longer than the rest of the look-up.


def _refuse_second_unscale(stage: OptState) -> None:
    if stage is OptState.UNSCALED:
        raise RuntimeError(
            "unscale_: expected one call per optimizer and iteration, got a second one: "
            "unscale_() has already been called on this optimizer since the last update()."
        )
    if stage is OptState.STEPPED:
        raise RuntimeError(
            "unscale_: expected a call before step(), got one after it: "
            "unscale_() is being called after step()."
        )


class UnscalingScaler(ScalerState):
    """The part of ``fastamp.GradScaler`` that unscales and checks gradients."""

    if TYPE_CHECKING:

        def _clip_now(self, optimizer: Any, record: OptimizerRecord) -> None: ...

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        notes = self._notes
        record = notes.record_of(optimizer)
        record.inv_scale = record.norm_factor = None  # Of an earlier pass.
        flags: dict[torch.device, Tensor]
        flags, subclassed, record.gradient_pass = _C.unscale_gradients(
            optimizer,
            inv_scale,
            found_inf,
            allow_fp16,
            record.memory,
            found_inf is notes.fresh_flag,
            True,
        )
        record.any_foreign = bool(subclassed)
        if subclassed:
            record.foreign_counts = unscale_subclasses(subclassed, flags, inv_scale, found_inf)
        return flags

    def _begin_unscale(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        notes = self._notes
        inv_scale, found_inf = notes.inv_scale_of(scale), _C.new_flag(scale)
        notes.fresh_flag = found_inf
        return inv_scale, found_inf

    def _unscale_and_agree(
        self, optimizer: torch.optim.Optimizer, inv: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        flags = self._unscale_grads_(optimizer, inv, found_inf, allow_fp16)
        if self.process_group is not None:
            agree_on_flags(flags, found_inf.device, self._device, self.process_group)
        return flags

    def _stage_of(self, optimizer: torch.optim.Optimizer) -> OptState:
        # Looks without inserting: a refused call must leave the mapping as it was.
        key = id(optimizer)
        state = self._per_optimizer_states.get(key)
        if state is None:
            return OptState.READY
        record = self._notes.records.get(key)
        if record is not None and record.optimizer() is not optimizer:
            self._notes.set_aside(key, self._per_optimizer_states)
            return OptState.READY
        stage: OptState = state["stage"]
        return stage

    def _current_mark(self) -> object:
        """Returns an object that is another one after each call of :meth:`scale`."""
        try:
            return self._mark
        except AttributeError:  # Somebody overrides scale().
            mark = self._mark = object()
            return mark

    def _warn_if_scaled_anew(self, function: str, optimizer: torch.optim.Optimizer) -> None:
        # Of an optimizer that was unscaled. torch goes on, and so do we: it may be meant.
        record = self._notes.records.get(id(optimizer))
        if record is not None and record.scaled_anew(optimizer, self._current_mark()):
            warnings.warn(
                f"{function}: expected the gradients that unscale_() has divided by the scale, got "
                "others, and scale() was called since: they are probably scaled. After an "
                "iteration that was broken off, call update() before the next; to replace unscaled "
                "gradients, write into them.",
                stacklevel=caller_level(),
            )

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of an optimizer by the scale, in place, and notes overflows.

        For code that looks at gradients before :meth:`step`, such as clipping; optional otherwise.
        Clipping that was put off to the step is done now. No host synchronisation. A sparse fp16
        gradient is replaced by its coalesced form.

        Args:
            optimizer: Any object with torch's ``param_groups``; gradients of fp32, fp64 or bf16.

        Raises:
            AssertionError: :meth:`scale` was never called, or a parameter is not a tensor.
            RuntimeError: Called twice, or after :meth:`step`, since the last :meth:`update`.
            ValueError: A gradient is fp16. No gradient was changed then.
        """
        if not self._enabled:
            return
        scale = self._scale
        if scale is None or self._growth_tracker is None:
            scale, _ = self._check_scale_growth_tracker("unscale_")
        key = id(optimizer)
        state = self._per_optimizer_states.get(key)
        if state is None:
            flags = self._unscale_fresh(optimizer, key, scale)
            self._per_optimizer_states[key] = {
                "stage": _UNSCALED,
                "found_inf_per_device": flags,
            }
            self._clip_if_put_off(optimizer, key)
            return
        _refuse_second_unscale(self._stage_of(optimizer))
        state = self._per_optimizer_states[
            key
        ]  # Another one, if that of a dead optimizer was there.
        state["found_inf_per_device"] = self._unscale_fresh(optimizer, key, scale)
        state["stage"] = _UNSCALED
        self._clip_if_put_off(optimizer, key)

    def _clip_if_put_off(self, optimizer: torch.optim.Optimizer, key: int) -> None:
        # Whoever unscales wants to see the gradients as the step will use them.
        record = self._notes.records[key]
        if record.clip_coef is not None or record.clip_value is not None:
            self._clip_now(optimizer, record)

    def _unscale_fresh(
        self, optimizer: torch.optim.Optimizer, key: int, scale: Tensor
    ) -> dict[torch.device, Tensor]:
        notes = self._notes
        record = notes.records.get(key)
        if record is None or record.optimizer() is not optimizer:
            record = notes.record_of(optimizer)
        if record.clip_coef is not None and record.scaled_anew(optimizer, self._current_mark()):
            record.start_iteration()  # Clipping was put off for gradients that are gone.
        try:
            record.mark = self._mark
        except AttributeError:
            record.mark = self._current_mark()
        if type(self)._unscale_grads_ is _UNSCALE_GRADS and (
            "_unscale_grads_" not in self.__dict__
        ):
            # What the general way does too, in one call.
            record.inv_scale = record.norm_factor = None
            inverse = None if notes.inverse is None else notes.inv_scale_of(scale)
            flags = _C.unscale_optimizer(optimizer, scale, inverse, record.memory)
            if flags is not None:
                record.any_foreign = False
                if self.process_group is not None:
                    agree_on_flags(flags, scale.device, self._device, self.process_group)
                return flags
        inv_scale, found_inf = self._begin_unscale(scale)
        flags = self._unscale_and_agree(optimizer, inv_scale, found_inf, False)
        gradient_pass = record.gradient_pass
        if gradient_pass is not None:
            _C.remember_pass(gradient_pass)
        return flags

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        one = torch.ones((), dtype=torch.float32, device=scale.device)
        flags = self._unscale_and_agree(optimizer, one, torch.zeros_like(one), True)
        self._notes.record_of(optimizer).norm_factor = self._notes.inv_scale_of(scale)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        for flag in optimizer_state["found_inf_per_device"].values():
            if flag.item():  # sync: the host decides whether optimizer.step runs
                return None
        return optimizer.step(*args, **kwargs)


_UNSCALE_GRADS = UnscalingScaler._unscale_grads_
