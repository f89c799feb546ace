"""The gradient scaler: torch.amp.GradScaler with the work on tensors done in C++."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from fastamp import _C
from fastamp._scaler_extras import agree_on_flags, check_bound, check_extras, checked_state
from fastamp._scaler_subclasses import unscale_subclasses

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["GradScaler", "OptState"]


class GradScaler(torch.amp.GradScaler):
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

    Raises:
        AssertionError: ``growth_factor`` <= 1 or ``backoff_factor`` >= 1, when enabled.
        TypeError: An argument after ``enabled`` has a wrong type.
        ValueError: ``min_scale``, ``max_scale`` or ``hysteresis`` is out of range, or
            ``init_scale`` is outside the bounds.
    """

    # Instances carry these names only when they are in use: by default an instance's __dict__ is
    # exactly torch's, so state and pickles go both ways.
    _min_scale: float | None = None
    _max_scale: float | None = None
    _hysteresis: int = 1
    _init_hysteresis_tracker: int = 1
    _hysteresis_tracker: Tensor | None = None
    process_group: ProcessGroup | None = None

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
    ) -> None:
        extras = check_extras("GradScaler", min_scale, max_scale, hysteresis)
        self._device = device
        self._enabled = enabled
        if enabled and device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            warnings.warn(
                "GradScaler: expected a CUDA device for device='cuda', but CUDA is not available.  "
                "Disabling.",
                stacklevel=2,
            )
            self._enabled = False
        if not self._enabled:
            return
        if growth_factor <= 1.0:
            raise AssertionError(
                f"GradScaler: expected growth_factor > 1.0, got {growth_factor!r}. "
                "The growth factor must be > 1.0."
            )
        if backoff_factor >= 1.0:
            raise AssertionError(
                f"GradScaler: expected backoff_factor < 1.0, got {backoff_factor!r}. "
                "The backoff factor must be < 1.0."
            )
        check_bound("GradScaler", "init_scale", init_scale, min_scale, max_scale)
        self._init_scale = init_scale
        self._scale: Tensor | None = None
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        self._growth_tracker: Tensor | None = None
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self.__dict__.update(extras)
        if process_group is not None:
            self.process_group = process_group

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        if self._hysteresis > 1:
            self._hysteresis_tracker = torch.full(
                (), self._init_hysteresis_tracker, dtype=torch.int32, device=dev
            )

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
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale_on(outputs.device)
        return self._scale_each(outputs, {})

    def _scale_on(self, device: torch.device) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        scale = self._scale
        if scale is None:
            raise AssertionError("scale: expected _lazy_init_scale_growth_tracker to set _scale")
        return scale if scale.device == device else scale.to(device=device, non_blocking=True)

    def _scale_each(self, outputs: Any, replicas: dict[torch.device, Tensor]) -> Any:
        if isinstance(outputs, torch.Tensor):
            device = outputs.device
            if device not in replicas:
                replicas[device] = self._scale_on(device)
            return outputs * replicas[device]
        if not isinstance(outputs, Iterable):
            raise ValueError(
                "scale: outputs must be a Tensor or an iterable of Tensors, "
                f"got {type(outputs).__name__}"
            )
        scaled = (self._scale_each(output, replicas) for output in outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        flags, subclassed = _C.unscale_gradients(optimizer, inv_scale, found_inf, allow_fp16)
        if subclassed:
            unscale_subclasses(subclassed, flags, inv_scale, found_inf)
        return flags

    def _stage_of(self, optimizer: torch.optim.Optimizer) -> OptState:
        # Looks without inserting: a refused call must leave the mapping as it was.
        state = self._per_optimizer_states.get(id(optimizer))
        return OptState.READY if state is None else state["stage"]

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of an optimizer by the scale, in place, and notes overflows.

        For code that looks at gradients before :meth:`step`, such as clipping; optional otherwise.
        No host synchronisation. A sparse fp16 gradient is replaced by its coalesced form.

        Args:
            optimizer: Any object with torch's ``param_groups``; gradients of fp32, fp64 or bf16.

        Raises:
            AssertionError: :meth:`scale` was never called, or a parameter is not a tensor.
            RuntimeError: Called twice, or after :meth:`step`, since the last :meth:`update`.
            ValueError: A gradient is fp16. No gradient was changed then.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        stage = self._stage_of(optimizer)
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
        inv_scale, found_inf = _C.begin_unscale(scale)
        flags = self._unscale_grads_(optimizer, inv_scale, found_inf, False)
        if self.process_group is not None:
            agree_on_flags(flags, scale, self._device, self.process_group)
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = flags
        state["stage"] = OptState.UNSCALED

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        one = torch.ones((), dtype=torch.float32, device=scale.device)
        flags = self._unscale_grads_(optimizer, one, torch.zeros_like(one), True)
        if self.process_group is not None:
            agree_on_flags(flags, scale, self._device, self.process_group)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # sync: the host decides whether optimizer.step runs; one read per device
        if any(flag.item() for flag in optimizer_state["found_inf_per_device"].values()):
            return None
        return optimizer.step(*args, **kwargs)

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
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._step_with_flags(optimizer, stage, args, kwargs)
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

    def _step_with_flags(
        self, optimizer: Any, stage: OptState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Steps an optimizer that skips by itself, by torch's protocol."""
        state = self._per_optimizer_states[id(optimizer)]
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument to the passed "
                "optimizer: read the attributes `grad_scale` and `found_inf`, which it sets on the "
                "optimizer, instead of taking `grad_scaler` in step().",
                FutureWarning,
                stacklevel=3,
            )
            result = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
            state["stage"] = OptState.STEPPED
            return result
        if stage is OptState.READY:
            self._check_inf_per_device(optimizer)
        scale = self._get_scale_async()
        if scale is None:
            raise AssertionError("step: expected _get_scale_async() to return a tensor, got None")
        flags = list(state["found_inf_per_device"].values())
        preset = getattr(optimizer, "grad_scale", None)
        if stage is not OptState.UNSCALED:
            preset = scale * (1 if preset is None else preset)
        optimizer.grad_scale = preset
        # 0 or 1 and never a count: torch's fused kernels compare with 1.
        optimizer.found_inf = _C.flag_for_optimizer(flags, scale.device) if flags else 0
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale
            del optimizer.found_inf
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends an iteration: moves the scale by what the iteration's gradients showed.

        Without an argument: lower by ``backoff_factor`` after an overflow, raise by
        ``growth_factor`` after ``growth_interval`` clean iterations in a row. No host
        synchronisation.

        Args:
            new_scale: The scale to use from now on: a float, or a tensor of one element on a device
                of the scaler's kind. Its value is copied; the growth count goes on.

        Raises:
            AssertionError: No gradients were checked since the last update, or ``new_scale`` is a
                tensor on another kind of device, of another size, or that requires grad.
            AttributeError: ``new_scale`` is neither a float nor a tensor.
            ValueError: ``new_scale`` is a float outside ``min_scale`` .. ``max_scale``. (A tensor
                is not read; the bounds apply to it at the next update.)
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            self._set_scale(scale, new_scale)
        else:
            flags = [
                flag
                for state in self._per_optimizer_states.values()
                for flag in state["found_inf_per_device"].values()
            ]
            if not flags:
                raise AssertionError(
                    "update: expected unscale_() or step() on an optimizer with gradients before "
                    "it, got neither: No inf checks were recorded prior to update."
                )
            _C.update_scale(
                scale,
                growth_tracker,
                flags,
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
                self._hysteresis_tracker,
                self._hysteresis,
                self._min_scale,
                self._max_scale,
            )
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def _set_scale(self, scale: Tensor, new_scale: float | Tensor) -> None:
        if isinstance(new_scale, float):
            check_bound("update", "new_scale", new_scale, self._min_scale, self._max_scale)
            scale.fill_(new_scale)
            return
        if not isinstance(new_scale, torch.Tensor):
            raise AttributeError(
                f"update: new_scale should be a float or a Tensor, got {type(new_scale).__name__}"
            )
        for accepted, got in (
            (new_scale.device.type == self._device, f"a tensor on {new_scale.device}"),
            (new_scale.numel() == 1, f"a tensor of shape {tuple(new_scale.shape)}"),
            (not new_scale.requires_grad, "a tensor with requires_grad=True"),
        ):
            if not accepted:
                raise AssertionError(
                    "update: new_scale should be a float or a 1-element tensor on a "
                    f"{self._device} device with requires_grad=False, got {got}"
                )
        scale.copy_(new_scale)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs, best after :meth:`update`.

        Returns:
            torch's five entries, "scale", "growth_factor", "backoff_factor", "growth_interval" and
            "_growth_tracker" (floats and ints), and "min_scale", "max_scale", "hysteresis" and
            "_hysteresis_tracker" if they are in use. Empty if the scaler is disabled. Waits for the
            device.
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
        self.__dict__.update(attributes)
        for tensor, value in (
            (self._scale, self._init_scale),
            (self._growth_tracker, self._init_growth_tracker),
        ):
            if tensor is not None:
                tensor.fill_(value)
        if self._hysteresis > 1 and self._scale is not None:
            self._hysteresis_tracker = torch.full(
                (), self._init_hysteresis_tracker, dtype=torch.int32, device=self._scale.device
            )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled and self._hysteresis > 1:
            state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
            state["_hysteresis_tracker"] = None
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> GradScaler:
        # A process group is a handle on something shared: copies speak over the same one.
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return clone
