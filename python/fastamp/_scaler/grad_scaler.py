# SPDX-License-Identifier: Apache-2.0
"""The gradient scaler: torch.amp.GradScaler over a native core."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

import fastamp._C as _C
from fastamp._scaler import steps
from fastamp._scaler.checks import (
    check_bound,
    check_extras,
    check_factors,
    check_step_options,
    checked_scale,
    cuda_is_missing,
)
from fastamp._scaler.clip import clip_grad_norm_
from fastamp._scaler.gradients import (
    check_is_optimizer,
    norm_groups,
    norm_of_copies,
    norm_over,
    parameters_of,
    unscale_shards,
    widen_gradients,
)
from fastamp._scaler.mesh_norm import norm_over_ranks
from fastamp._scaler.new_scalers import note_scaler
from fastamp._scaler.outputs import scale_each
from fastamp._scaler.passes import unscaled, zero_if
from fastamp._scaler.reports import warn_of_scaled_gradients
from fastamp._scaler.resumed import goes_on, warn_of_missing_state
from fastamp._scaler.state import ScalerState, unscale_once
from fastamp._scaler.subclasses import agree_over_meshes, meshes_of
from fastamp._util.scaled_backward import scaled
from fastamp._util.tensors import on_device
from fastamp._util.watched_step import call_is_a_message

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from fastamp._scaler.mesh_norm import ShardGroup, Shards
    from fastamp._scaler.on_skip import SkipHook

__all__ = ["GradScaler", "OptState"]

# Attributes of an Enum take longer to look up than most of what is done with them here.
_READY, _UNSCALED, _STEPPED = OptState.READY, OptState.UNSCALED, OptState.STEPPED


@functools.cache
def _class_replaces(kind: type, methods: tuple[str, ...]) -> bool:
    return any(getattr(kind, name) is not getattr(GradScaler, name) for name in methods)


class GradScaler(ScalerState):
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
        fast_growth_interval: Clean iterations between two growths until the scale first falls,
            and, after it fell several times in a row, until it is back where the first fall had
            left it. ``None``, as torch: always ``growth_interval``.
        on_skip: As if :meth:`register_on_skip` had been called with it.
        process_group: Overflows are agreed on over this group (one MAX all-reduce per optimizer and
            iteration, which every member must reach): if one rank overflows, all skip. ``None``:
            no communication.
        fuse: Carry every ``torch.optim.SGD``, ``Adam``, ``AdamW`` and ``Muon`` that is stepped by
            ``fastamp.optim.fuse_`` from then on.
        keep_scaled_grads: Leave gradients as ``backward`` made them where the optimizer's step
            unscales and clips them itself (``fastamp.optim``, ``fuse``), instead of writing them
            back as torch does; saves 4 bytes of traffic per fp32 gradient.
        history_size: Iterations kept for :meth:`history`, at least 0. If given, past steps are part
            of :meth:`state_dict` too; by default 128 are kept and none saved.

    Raises:
        AssertionError: ``growth_factor`` <= 1 or ``backoff_factor`` >= 1, when enabled.
        TypeError: An argument after ``enabled`` has a wrong type.
        ValueError: ``min_scale``, ``max_scale``, ``hysteresis`` or ``fast_growth_interval`` is out
            of range, or ``init_scale`` is outside the bounds.
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
        fast_growth_interval: int | None = None,
        on_skip: SkipHook | None = None,
        process_group: ProcessGroup | None = None,
        fuse: bool = False,
        keep_scaled_grads: bool = False,
        history_size: int | None = None,
    ) -> None:
        """Checks and keeps the options; nothing is created on a device yet."""
        extras = check_extras("GradScaler", min_scale, max_scale, hysteresis, fast_growth_interval)
        extras |= check_step_options("GradScaler", fuse, keep_scaled_grads, history_size)
        self._device = device
        self._enabled = enabled
        if enabled and device == "cuda" and cuda_is_missing():
            text = (
                "expected a CUDA device for device='cuda', but CUDA is not available.  Disabling."
            )
            warnings.warn(f"GradScaler: {text}", stacklevel=2)
            self._enabled = False
        self._is_new = True
        note_scaler(self)
        if on_skip is not None:
            self._add_skip_hook("GradScaler", "on_skip", on_skip, False)
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

    def _is_replaced(self, *methods: str) -> bool:
        """Whether a subclass, or somebody on this object, has methods of these names."""
        for name in methods:
            if name in self.__dict__:
                return True
        return _class_replaces(type(self), methods)  # type: ignore[arg-type]

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
        try:
            self._times_scaled += 1
        except AttributeError:
            self._times_scaled = 1
        if isinstance(outputs, torch.Tensor):
            return scaled(outputs, self._scale_on(outputs.device))
        return scale_each(outputs, self._scale_on, {})

    def _scale_on(self, device: torch.device) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return on_device(self._scale, device)

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
            ValueError: A gradient is fp16, and the optimizer was not given to
                ``fastamp.optim.fuse_`` with ``widen_grads=True``. No gradient was changed then.
        """
        if not self._enabled:
            return
        no_scale = self._scale is None or self._growth_tracker is None
        if no_scale or id(optimizer) in self._per_optimizer_states:
            self._begin("unscale_", optimizer)
        core = self._core
        is_native = not self._is_replaced("_unscale_grads_")
        if getattr(optimizer, "_fastamp_widens_grads", False):
            widen_gradients(optimizer)
        if is_native and core.unscale(self, optimizer):
            return
        scale = self._scale
        assert scale is not None
        flags = self._unscale_grads_(optimizer, core.inv_scale(scale), core.new_flag(scale), False)
        if self.process_group is not None:
            core.agree(self, flags, scale)
        self._note_unscaled(optimizer, flags)

    @contextlib.contextmanager
    def pass_(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Makes a pass whose gradients the program uses by itself, ahead of others of the step.

        ::

            with scaler.pass_(optimizer):
                optimizer.zero_grad()
                scaler.scale(loss_fn(model(x), y)).backward()
            move_uphill(parameters)  # by gradients without a scale
            optimizer.zero_grad()
            scaler.scale(loss_fn(model(x), y)).backward()
            move_back(parameters)
            scaler.step(optimizer)  # is skipped if one of the two has overflowed
            scaler.update()

        At the end of the block gradients are unscaled; if one of them is inf or NaN, all are 0, and
        those of further passes too, so that nothing moves by them. It counts as an overflow of the
        iteration: ``step`` is skipped, and ``update`` lowers the scale. There may be any number of
        passes, and no ``step`` after them, as in a closure of ``LBFGS``. Begin each, and what
        follows, with ``zero_grad``. Waits for nothing on CUDA; sets gradients to 0 by one small
        kernel each.

        Args:
            optimizer: As for :meth:`unscale_`. Those of other optimizers stay scaled.

        Returns:
            A context manager, for one ``with``. Of a disabled scaler it does nothing. After an
            exception in the block gradients are left as they are.

        Raises:
            RuntimeError: When the block begins: the optimizer was unscaled or stepped since the
                last :meth:`update`, or is in such a block. When it ends: no loss was given to
                :meth:`scale`, or no parameter has a gradient.
            TypeError: ``optimizer`` has no ``param_groups``. :meth:`unscale` takes tensors.
            ValueError: As from :meth:`unscale_`, when it ends.
        """
        check_is_optimizer("pass_", optimizer)
        if not self.is_enabled():
            yield
            return
        _C.check_order("pass_", self._stage_of(optimizer).value)
        if id(optimizer) in self._open_passes:
            raise RuntimeError("pass_: expected an optimizer without an open pass, got one in one")
        self._open_passes = self._open_passes | {id(optimizer)}
        before = getattr(self, "_times_scaled", 0)
        try:
            yield
        finally:
            self._open_passes = self._open_passes - {id(optimizer)}
            if not self._open_passes:
                del self._open_passes
        if getattr(self, "_times_scaled", 0) == before:
            raise RuntimeError(
                "pass_: expected a block that gives its loss to scale(), got one that does not"
            )
        _C.check_order("pass_", self._stage_of(optimizer).value)
        self.unscale_(optimizer)
        flags = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not flags:
            del self._per_optimizer_states[id(optimizer)]
            raise RuntimeError("pass_: expected an optimizer with at least one gradient, got none")
        for parameter in self._core.end_pass(self, optimizer):
            zero_if(parameter, flags.values())

    def unscale(self, tensors: Any) -> Any:
        """Divides gradients of a scaled loss that the program computes with, such as a penalty's.

        ::

            gradients = torch.autograd.grad(scaler.scale(loss), inputs, create_graph=True)
            penalty = sum(g.square().sum() for g in scaler.unscale(gradients))

        Args:
            tensors: A floating-point tensor of any shape, or a list or tuple of such. ``None``
                among them stays.

        Returns:
            ``tensors / scale``, new and differentiable, of the same structure; float32 of 16-bit
            ones. The tensors themselves if the scaler is disabled. Overflows are not noted: the
            backward pass of what is made of them meets them. Waits for nothing.

        Raises:
            AssertionError: :meth:`scale` was never called.
            TypeError: It is something else.
        """
        if not self._enabled:
            return tensors
        self._expect_scale("unscale")
        assert self._scale is not None
        return unscaled(tensors, self._core.inv_scale(self._scale))

    def _begin(self, function: str, optimizer: torch.optim.Optimizer) -> OptState:
        """Refuses a call on an optimizer that is out of order; warns of gradients scaled anew."""
        self._expect_scale(function)
        stage = self._stage_of(optimizer)
        if stage is not _READY:  # Before anything else, nothing is out of order.
            _C.check_order(function, stage.value)
            if stage is _UNSCALED and self._core.scaled_anew(self, optimizer):
                warn_of_scaled_gradients(function)  # torch goes on, and so do we: it may be meant.
        return stage

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        core = self._core  # Makes _times_scaled, too.
        scaled = self._times_scaled
        flags = unscale_shards(core, optimizer, inv_scale, found_inf, allow_fp16, scaled)
        agree_over_meshes(meshes_of(optimizer), flags, found_inf)
        return flags

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        core = self._core
        one = torch.ones((), dtype=torch.float32, device=scale.device)
        flags = self._unscale_grads_(optimizer, one, torch.zeros_like(one), True)
        if self.process_group is not None:
            core.agree(self, flags, scale)
        core.note_still_scaled(optimizer, scale)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def _supports_amp_step(self, optimizer: Any) -> bool:
        """Whether an optimizer is stepped with an AmpStep: the device decides on the skip."""
        return (
            getattr(optimizer, "_fastamp_supports_amp_step", False) is True
            and not self._is_replaced("_maybe_opt_step", "step")
            and not call_is_a_message(optimizer)
        )

    def _may_check(self) -> bool:
        """Whether gradients may be left scaled until the step: nobody's ``unscale_`` is called."""
        return not self._is_replaced("unscale_", "_unscale_grads_")

    def _unscale_with_norm(
        self, optimizer: torch.optim.Optimizer, groups: list[ShardGroup], norm_type: float
    ) -> Tensor:
        """Unscales and takes the norm over ranks: flags travel with the norm's sums."""
        scale, core = self._scale, self._core
        assert scale is not None
        found_inf = core.new_flag(scale)
        inv_scale, scaled = core.inv_scale(scale), self._times_scaled
        flags = unscale_shards(core, optimizer, inv_scale, found_inf, False, scaled)
        flag = flags.setdefault(scale.device, found_inf)
        for other in flags.values():
            flag.copy_(torch.maximum(flag, on_device(other, flag.device)))
        norm = norm_over_ranks(parameters_of(optimizer), groups, norm_type, flag)
        for other in flags.values():
            other.copy_(flag)
        names = [entry.group.group_name for entry in groups]
        if self.process_group is not None and self.process_group.group_name not in names:
            core.agree(self, flags, scale)
        self._note_unscaled(optimizer, flags)
        return norm

    def _unscaled_norm(
        self,
        optimizer: torch.optim.Optimizer,
        mesh: Shards | None,
        groups: list[ShardGroup],
        norm_type: float,
    ) -> Callable[[], Tensor] | None:
        """Unscales gradients unless that was done.

        Returns:
            What gives their norm over ranks; ``None``: it is this rank's.
        """
        replaced = self._is_replaced("unscale_", "_unscale_grads_")
        if groups and not replaced and self._stage_of(optimizer) is _READY:
            norm = self._unscale_with_norm(optimizer, groups, norm_type)
            return lambda: norm
        unscale_once(self, optimizer)
        return norm_over(optimizer, mesh, norm_type) if groups else None

    def _note_unscaled(self, optimizer: Any, flags: dict[torch.device, Tensor]) -> None:
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = flags
        state["stage"] = _UNSCALED
        self._core.apply_clips(self, optimizer)

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
        stage = self._begin("step", optimizer)
        if self._is_new and goes_on(optimizer):
            self._is_new = False
            warn_of_missing_state(optimizer, self.get_scale())
        if self._fuse:
            steps.fuse_if_torchs(optimizer)
        # A closure given by position is torch's business.
        if self._supports_amp_step(optimizer) and all(argument is None for argument in args):
            return self._step_on_device(optimizer, args, kwargs)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._step_by_flags(optimizer, stage, args, kwargs)
        if stage is _READY:
            self.unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if len(state["found_inf_per_device"]) == 0:
            if stage is _READY:  # A refused call takes its own unscale_ back.
                del self._per_optimizer_states[id(optimizer)]
            _C.refuse_no_gradients()
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = _STEPPED
        return result

    def _step_on_device(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Steps an optimizer of fastamp's: the device decides whether it does."""
        core, keep, may_check = self._core, self._keep_scaled_grads, self._may_check()
        amp_step, is_observed = core.begin_step(self, optimizer, keep, may_check, False)
        if amp_step is None:  # The gradients must not stay scaled until the step.
            self.unscale_(optimizer)
            amp_step, is_observed = core.begin_step(self, optimizer, keep, may_check, True)
        result = optimizer._fastamp_amp_step(amp_step, is_observed, *args, **kwargs)
        state = self._per_optimizer_states.get(id(optimizer))
        if state is not None:  # Code that ran in the step may have called update().
            state["stage"] = _STEPPED
        return result

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

    def _step_by_flags(self, optimizer: Any, stage: OptState, args: Any, kwargs: Any) -> Any:
        """Steps an optimizer that skips by itself, by torch's protocol."""
        state = self._per_optimizer_states[id(optimizer)]
        if steps.takes_scaler(optimizer):
            result = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        else:
            if stage is _READY:
                self._check_inf_per_device(optimizer)
            scale = self._get_scale_async()
            flags = list(state["found_inf_per_device"].values())
            unscaled = stage is _UNSCALED
            result = steps.step_with_flags(optimizer, scale, flags, unscaled, args, kwargs)
        state["stage"] = _STEPPED
        return result

    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        mesh: Shards | None = None,
    ) -> Tensor:
        """Clips the gradients of an optimizer by their norm after unscaling.

        Call it between ``backward`` and :meth:`step`, with or without :meth:`unscale_` before it.
        Optimizers of ``fastamp.optim`` apply the factor within :meth:`step`: until then the
        gradients are as they were, and edits of them meanwhile are clipped by the same factor. For
        others the gradients are unscaled, if they are not yet, and clipped at once. Either way the
        norm comes from the pass that checks the gradients. No synchronisation but for
        ``error_if_nonfinite`` and, in a program with DTensors, the mesh's collectives.

        Args:
            optimizer: Whose gradients are clipped; all of them together.
            max_norm: Largest norm that is left.
            norm_type: Order of the norm; may be ``inf``. Orders but 2 cost a pass of their own.
            error_if_nonfinite: Refuse a norm that is inf or NaN; waits for the device. An overflow
                of the loss scale is refused too: without it, such a step is skipped.
            mesh: As for :func:`fastamp.clip_grad_norm_`: whose shards the norm is of. It says
                nothing about overflows; ranks agree on them by ``process_group``. Gradients are
                unscaled by this call then.

        Returns:
            The norm of the unscaled gradients before clipping: a scalar tensor, over all shards if
            gradients are DTensors. 0 if there are no gradients.

        Raises:
            AssertionError: :meth:`scale` was never called.
            RuntimeError: Called after :meth:`step`, or the norm is not finite, with
                ``error_if_nonfinite``; gradients are not clipped then.
            TypeError: ``optimizer`` has no ``param_groups``. :func:`fastamp.clip_grad_norm_` takes
                parameters.
            TypeError, ValueError: As for ``mesh`` of :func:`fastamp.clip_grad_norm_`.
        """
        check_is_optimizer("clip_grad_norm_", optimizer)
        if not self._enabled:
            parameters = parameters_of(optimizer)
            return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, mesh=mesh)
        norm_type = float(norm_type)
        # A bad mesh is refused before all else; without one the core knows if there are others.
        groups = [] if mesh is None else norm_groups(optimizer, mesh, norm_type)
        self._begin("clip_grad_norm_", optimizer)
        if self._fuse:
            steps.fuse_if_torchs(optimizer)
        core = self._core
        at_step = self._supports_amp_step(optimizer)
        if at_step and norm_type == 2.0 and mesh is None and self._may_check():
            norm = core.clip_norm_at_step(
                self, optimizer, float(max_norm), error_if_nonfinite, False
            )
            if norm is not None:
                return norm
        if mesh is None:
            groups = norm_groups(optimizer, None, norm_type)
        norm_function = self._unscaled_norm(optimizer, mesh, groups, norm_type)
        if error_if_nonfinite and norm_function is not None and meshes_of(optimizer):
            state = self._per_optimizer_states[id(optimizer)]
            norm_function = norm_of_copies(norm_function, state["found_inf_per_device"].values())
        return core.clip_norm(
            self,
            optimizer,
            float(max_norm),
            norm_type,
            error_if_nonfinite,
            at_step,
            norm_function,
        )

    def clip_grad_value_(self, optimizer: torch.optim.Optimizer, clip_value: float) -> None:
        """Brings every element of an optimizer's gradients within [-clip_value, clip_value].

        When it happens and what it may follow is as for :meth:`clip_grad_norm_`; clipping by value
        comes after clipping by norm if both are asked for in that order. No synchronisation.

        Args:
            optimizer: Whose gradients are clipped.
            clip_value: Largest magnitude that is left.

        Raises:
            AssertionError: :meth:`scale` was never called.
            RuntimeError: Called after :meth:`step`.
        """
        clip_value = float(clip_value)
        if not self._enabled:
            torch.nn.utils.clip_grad_value_(parameters_of(optimizer), clip_value)
            return
        self._begin("clip_grad_value_", optimizer)
        clip = self._core.clip_value
        takes_part = self._supports_amp_step(optimizer), self._may_check()
        todo = clip(self, optimizer, clip_value, *takes_part)
        if todo != _C.ClipNext.NOTHING:
            self.unscale_(optimizer)  # Clips, too.
        if todo == _C.ClipNext.APPLY_THEN_REPEAT:
            clip(self, optimizer, clip_value, *takes_part)

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
        scale, _ = self._check_scale_growth_tracker("update")
        self._is_new = False
        wanted = None
        if new_scale is not None:
            bounds = (self._min_scale, self._max_scale)
            wanted = checked_scale(scale, new_scale, self._device, *bounds)
        if hasattr(self, "_statistics"):
            states = tuple(self._per_optimizer_states.values())
            self._statistics.poll(
                flag for state in states for flag in state["found_inf_per_device"].values()
            )
        # A stream that is captured runs later: nothing can be read back now.
        capturing = scale.is_cuda and torch.cuda.is_current_stream_capturing()
        has_news = self._core.end_iteration(self, wanted, capturing)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        if has_news:
            self._notify_of_iteration(capturing)
