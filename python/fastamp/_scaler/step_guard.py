# SPDX-License-Identifier: Apache-2.0
"""The guard of steps without a gradient scaler: the scaler's decision without its scale."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo

import fastamp._C as _C
from fastamp._scaler import steps
from fastamp._scaler.checks import Past
from fastamp._scaler.gradients import (
    norm_of_copies,
    norm_over,
    parameters_of,
    two_norm_of,
    unscale_shards,
)
from fastamp._scaler.guard_checks import (
    check_group,
    check_guard_options,
    check_guarded,
    check_spike_numbers,
    checked_guard_past,
    checked_norms,
)
from fastamp._scaler.kept_statistics import RestoredStatistics
from fastamp._scaler.logs import note_core
from fastamp._scaler.mesh_norm import shard_groups
from fastamp._scaler.on_skip import SkipHook, SkipHooks
from fastamp._scaler.rank_reports import gathered
from fastamp._scaler.reports import (
    OverflowReport,
    StepRecord,
    caller_level,
    make_report,
    names_by_identity,
)
from fastamp._scaler.state import weakly
from fastamp._scaler.subclasses import agree_over_meshes, meshes_of
from fastamp._util.tensors import ordinary_tensors
from fastamp._util.watched_step import GuardedStep, call_is_a_message

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.utils.hooks import RemovableHandle

    from fastamp._scaler.mesh_norm import Shards

__all__ = ["StepGuard"]


class _ClosureOnce:
    """A closure whose first call was made before the step; later ones are the optimizer's own."""

    def __init__(self, closure: Callable[[], Any], loss: Any) -> None:
        self._closure, self._loss, self._was_used = closure, loss, False

    def __call__(self) -> Any:
        if self._was_used:
            return self._closure()
        self._was_used = True
        return self._loss


def _split_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any] | None, tuple[Any, ...], dict[str, Any]]:
    """Returns the closure, and the other arguments of ``step``."""
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    if callable(kwargs.get("closure")):
        return kwargs["closure"], args, {k: v for k, v in kwargs.items() if k != "closure"}
    return None, args, kwargs


#: Gradients, and how often each was written.
_Versions = list[tuple["weakref.ref[Tensor]", int]]


def _versions_of(optimizer: torch.optim.Optimizer) -> _Versions:
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    return [(weakref.ref(gradient), gradient._version) for gradient in gradients]


def _are_as_they_were(optimizer: torch.optim.Optimizer, versions: _Versions) -> bool:
    now = _versions_of(optimizer)
    return len(now) == len(versions) > 0 and all(
        gradient() is earlier() and version == earlier_version
        for (gradient, version), (earlier, earlier_version) in zip(now, versions, strict=True)
    )


class StepGuard:
    """Skips steps of an optimizer whose gradients are not finite, without a gradient scaler.

    In bfloat16, float32 and fp8 nobody scales, and so nobody checks: one batch with a NaN ruins
    weights and moments. ::

        guard = fastamp.StepGuard(optimizer)
        loss.backward()
        guard.clip_grad_norm_(1.0)  # or any other clipping, or none
        optimizer.step()  # is guarded, whoever calls it

    A skipped step changes no bit of parameters, moments and step counts; one that is not skipped is
    the optimizer's own, bit for bit. With optimizers of ``fastamp.optim`` (``fuse_``), and torch's
    with ``fused=True``, the device decides and nothing waits for it; with others, ``step`` waits
    for one flag. It lasts as long as the optimizer, or until :meth:`release`; copies and pickles of
    the optimizer are not guarded. Under a closure, gradients are those of its first call. A step
    that an enabled ``GradScaler`` makes is the scaler's: where the device decides, the guard does
    not count it. Not thread-safe.

    Args:
        optimizer: A ``torch.optim.Optimizer`` that is not guarded yet.
        skip: "nonfinite": steps with a gradient, or a loss given to :meth:`check_loss`, that is inf
            or NaN. "spike": those too whose gradient norm is far above the norms before.
        spike_factor: How far: above this many times, more than 1.
        spike_of: Of their "median", or their running "mean", in which a norm weighs 1 / n until n
            is ``spike_window``, and spikes as if they were at the bound.
        spike_window: Of how many of the last finite norms, from 2 to 65536. None of the first 16 is
            a spike.
        max_consecutive: Most steps that may be skipped in a row, at least 0; one more, and ``step``
            raises an error that names the parameters. ``None``: any number, with a warning at 20.
        group: Ranks of this group agree by one MAX all-reduce in each step, which every member must
            reach: if one skips, all do. ``None``: no communication.
        on_skip: As if :meth:`register_on_skip` had been called with it.
        named_parameters: Where the names in the error of ``max_consecutive`` come from: the model,
            or ``model.named_parameters()``.
        history_size: Steps kept for :meth:`history`, at least 0.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: It is out of its range, the optimizer is guarded, or is an ``LBFGS``, whose step
            evaluates gradients more than once.
    """

    # What the native core reads of a scaler: a scale of 1 that stays. Ranks agree in the step, and
    # in a clip that may raise.
    process_group: ProcessGroup | None = None
    _scale: Tensor
    _growth_tracker: Tensor
    _per_optimizer_states = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        skip: str = "nonfinite",
        spike_factor: float = 10.0,
        spike_of: str = "median",
        spike_window: int = 128,
        max_consecutive: int | None = None,
        group: ProcessGroup | None = None,
        on_skip: SkipHook | None = None,
        named_parameters: Any = None,
        history_size: int = 128,
    ) -> None:
        """Guards from now on; nothing is created on a device yet."""
        before = _guards.get(check_guarded("StepGuard", optimizer))
        check_guard_options("StepGuard", skip, spike_of, max_consecutive, history_size)
        check_spike_numbers("StepGuard", spike_factor, spike_window)
        check_group("StepGuard", group)
        if before is not None and not before.is_automatic:
            raise ValueError(
                "StepGuard: expected an optimizer without a guard, got one that has one"
            )
        self._names = names_by_identity(named_parameters, "StepGuard")
        self._spike: _C.SpikeRule | None = None
        if skip == "spike":
            self._spike = _C.SpikeRule(spike_factor, spike_of == "mean", spike_window)
        self._max_consecutive = max_consecutive
        self._group = group
        self._history_size = history_size
        self._hooks: SkipHooks | None = None  # None: the core need not read rows of skips back.
        self._statistics: RestoredStatistics | None = None
        self._times_scaled = 0  # Calls here: between two of them gradients may have become others.
        self._not_finite: list[Tensor] = []  # Beside gradients, for the next step.
        self._norm_is_agreed = False  # One of these is the same on all ranks.
        # Gradients that only Python can check, as a clip has left them, and this rank's own flags
        # from before it.
        self._clipped: tuple[_Versions, dict[torch.device, Tensor]] | None = None
        self._kept_core: _C.ScalerCore | None = None
        self._loaded = Past([], None, 0)
        self._optimizer = weakref.ref(optimizer)
        if on_skip is not None:
            self._add_skip_hook("StepGuard", "on_skip", on_skip, False)
        if before is not None:
            before.release()
        # The optimizer holds the step, which holds this guard.
        self._guarded_step = weakref.ref(GuardedStep(optimizer, self._step))
        _guards[optimizer] = self

    #: Whether a program that knows nothing of it was given this guard, which may give way.
    is_automatic = False

    def release(self) -> None:
        """Ends the guard: ``step`` is the optimizer's own again. Safe to call again."""
        step, optimizer = self._guarded_step(), self._optimizer()
        if step is not None:
            step.remove()
        if optimizer is not None and _guards.get(optimizer) is self:
            del _guards[optimizer]

    # -- steps

    def _guarded(self, function: str) -> torch.optim.Optimizer:
        optimizer, step = self._optimizer(), self._guarded_step()
        if optimizer is None or step is None or step.guarded is None:
            raise RuntimeError(
                f"{function}: expected a guard of an optimizer, got one that was released, or "
                "whose optimizer is gone"
            )
        return optimizer

    def _step(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``optimizer.step``. Called by the object in its place."""
        if torch.compiler.is_dynamo_compiling():
            return _step_uncompiled(self, plain, args, kwargs)
        optimizer: Any = self._optimizer()  # It is stepping.
        closure = loss = None
        if args or kwargs:
            closure, args, kwargs = _split_closure(args, kwargs)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        core = self._prepare(optimizer)
        spike = None if self._spike is None else self._spike.copy()
        try:
            amp_step, is_observed = self._decide(core, optimizer)
            supports = getattr(optimizer, "_fastamp_supports_amp_step", False) is True
            if supports and not call_is_a_message(optimizer):
                result = optimizer._fastamp_amp_step(amp_step, is_observed, *args, **kwargs)
            elif getattr(optimizer, "_step_supports_amp_scaling", False):
                result = self._step_by_flag(optimizer, amp_step, args, kwargs)
            elif amp_step.found_inf is not None and amp_step.found_inf.item():
                result = None  # sync: the host decides whether optimizer.step runs
            else:
                core.apply_clips(self, optimizer)
                if closure is not None:
                    kwargs = {**kwargs, "closure": _ClosureOnce(closure, loss)}
                result = plain(*args, **kwargs)
        except BaseException:
            self._spike = spike  # A step that was not made has no norm.
            core.forget(self, optimizer)
            raise
        self._end(core, optimizer)
        return result if closure is None else loss

    def _step_by_flag(
        self, optimizer: Any, amp_step: _C.AmpStep, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Steps an optimizer that skips by itself, by torch's protocol."""
        self._core.apply_clips(self, optimizer)
        flags = [] if amp_step.found_inf is None else [amp_step.found_inf]
        return steps.step_with_flags(optimizer, self._scale, flags, True, args, kwargs)

    def _prepare(self, optimizer: torch.optim.Optimizer) -> _C.ScalerCore:
        self._times_scaled += 1
        core = self._kept_core
        if core is None:
            device = next((p.device for p in parameters_of(optimizer)), torch.device("cpu"))
            with ordinary_tensors():
                self._scale = torch.ones((), dtype=torch.float32, device=device)
                self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
            self._kept_core = core = _C.ScalerCore(
                1.0, self._history_size, self._device_of_group(device), None
            )
            if self._hooks is not None:
                core.notify_skips(weakly(self._notify_of_skip))
            core.load(1.0, list(self._loaded.history), self._loaded.skipped_in_a_row)
            note_core(self, core)
        return core

    def _core_for_log(self) -> _C.ScalerCore:
        return self._prepare(self._guarded("log_to"))

    def _device_of_group(self, device: torch.device) -> str:
        # Gradients that are offloaded to the host are agreed on by the backend's device.
        if self._group is not None and torch.distributed.get_backend(self._group) == "nccl":
            return "cuda"
        return device.type

    @property
    def _core(self) -> _C.ScalerCore:
        core = self._kept_core
        assert core is not None
        return core

    def _decide(
        self, core: _C.ScalerCore, optimizer: torch.optim.Optimizer
    ) -> tuple[_C.AmpStep, bool]:
        not_finite, self._not_finite = self._not_finite, []
        agrees = self._group is not None and not self._norm_is_agreed
        self._norm_is_agreed = False
        agree = self._agree_on if agrees else None
        begin = core.begin_unscaled_step
        amp_step, seen = begin(self, optimizer, False, not_finite, self._spike, None, agree)
        if amp_step is None:
            norm = self._check_subclasses(optimizer)
            amp_step, seen = begin(self, optimizer, True, not_finite, self._spike, norm, agree)
        assert amp_step is not None
        return amp_step, seen

    def _check_subclasses(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Checks gradients of which some are tensor subclasses; the norm for the spike rule."""
        one = self._scale
        flag = torch.zeros_like(one)
        flags = unscale_shards(self._core, optimizer, one, flag, True, self._times_scaled)
        versions, earlier = self._clipped or ([], {})
        if _are_as_they_were(optimizer, versions):  # A clip may have hidden an inf.
            for device, before in earlier.items():
                flags[device] = torch.maximum(flags[device], before)
        own = {device: flag.clone() for device, flag in flags.items()}
        self._clipped = (_versions_of(optimizer), own)
        agree_over_meshes(meshes_of(optimizer), flags, flag)
        self._core.note_checked(optimizer, list(flags.values()))
        return None if self._spike is None else two_norm_of(optimizer)

    def _agree_on(self, flag: Tensor) -> None:
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._group)

    def _end(self, core: _C.ScalerCore, optimizer: torch.optim.Optimizer) -> None:
        self._clipped = None
        if self._statistics is not None:
            self._statistics.poll(core.flags(optimizer))
        has_news = core.end_step()
        if has_news is None:
            core.forget(self, optimizer)  # There were no gradients.
            return
        wait = self._hooks is not None and not self._is_captured() and self._hooks.wait()
        if has_news or wait:
            self._settle(wait)
        if self._max_consecutive is None:
            return
        skips = core.skipped_in_a_row
        if skips > self._max_consecutive:
            raise RuntimeError(
                f"step: expected at most {self._max_consecutive} skipped steps in a row, got "
                f"{skips}. {self._own_report(self._names)}"
            )

    def _is_captured(self) -> bool:
        # Such a stream runs later: nothing can be read back now.
        return self._scale.is_cuda and torch.cuda.is_current_stream_capturing()

    def _settle(self, wait: bool) -> None:
        if self._core.poll(wait) is not None:
            warnings.warn(
                f"StepGuard: {self._core.skipped_in_a_row} steps in a row were skipped. Look at "
                "guard.overflow_report(model) for the parameters concerned, at the loss and the "
                "inputs of that step for NaN, and at guard.history() for when it began.",
                stacklevel=caller_level(),
            )

    # -- what may come before a step

    def check_loss(self, loss: Tensor) -> None:
        """Skips the next step, too, if a loss is inf or NaN. Does not wait for the device.

        Args:
            loss: A tensor of one element and a floating dtype. It is not kept in its graph.

        Raises:
            TypeError: It is no tensor.
            ValueError: It has another number of elements, or another dtype.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"check_loss: expected loss to be a Tensor, got {type(loss).__name__}")
        if loss.numel() != 1 or not loss.is_floating_point():
            raise ValueError(
                "check_loss: expected a loss of one element and a floating dtype, got "
                f"{loss.dtype} of shape {tuple(loss.shape)}"
            )
        self._guarded("check_loss")
        self._not_finite.append(loss.detach().reshape(()))
        self._norm_is_agreed = False

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        mesh: Shards | None = None,
    ) -> Tensor:
        """Clips the gradients by the norm of all of them, within the step.

        The pass that checks them sums the norm, too. Until the step they are as they were. It costs
        less than clipping before it, and a step that is skipped is reported by the gradients that
        were not finite: clipping by a norm of NaN makes NaN of all.

        Args:
            max_norm: Largest norm that is left.
            norm_type: Order of the norm; may be ``inf``. Orders but 2 cost a pass of their own.
            error_if_nonfinite: Refuse a norm that is inf or NaN; waits for the device.
            mesh: As for :func:`fastamp.clip_grad_norm_`: whose shards the norm is of. If one of its
                groups has all ranks of ``group``, and shards of all parameters, these need no
                collective of their own in this step: a norm that is not finite is on all of them.

        Returns:
            The norm before clipping, a scalar tensor. 0 if there are no gradients.

        Raises:
            RuntimeError: The norm is not finite, with ``error_if_nonfinite``; nothing is clipped.
            TypeError, ValueError: As for ``mesh`` of :func:`fastamp.clip_grad_norm_`.
        """
        optimizer = self._guarded("clip_grad_norm_")
        norm_type = float(norm_type)
        norm_function = None
        if mesh is not None or norm_type != 2.0:  # Else the core knows if there are meshes.
            norm_function = norm_over(optimizer, mesh, norm_type)
        at_step = norm_type == 2.0 and norm_function is None
        is_first = at_step and self._clipped is None
        core = self._prepare(optimizer) if is_first else self._begin_clip(optimizer)
        self.process_group = self._group if error_if_nonfinite else None
        try:
            norm = None
            if at_step:
                norm = core.clip_norm_at_step(
                    self, optimizer, float(max_norm), error_if_nonfinite, True
                )
            if norm is None:
                norm = self._clip_checked(
                    optimizer,
                    float(max_norm),
                    norm_type,
                    error_if_nonfinite,
                    norm_over(optimizer, mesh, norm_type) if at_step else norm_function,
                )
        finally:
            self.process_group = None
        self._note_clipped(optimizer)
        if mesh is not None:
            self._norm_is_agreed = self._reaches_all(mesh, norm_type) and not self._not_finite
            self._not_finite.append(norm)
        return norm

    def _clip_checked(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        norm_function: Callable[[], Tensor] | None,
    ) -> Tensor:
        self._check(optimizer)
        if error_if_nonfinite and norm_function is not None and meshes_of(optimizer):
            norm_function = norm_of_copies(norm_function, self._core.flags(optimizer))
        return self._core.clip_norm(
            self, optimizer, max_norm, norm_type, error_if_nonfinite, True, norm_function
        )

    def _begin_clip(self, optimizer: torch.optim.Optimizer) -> _C.ScalerCore:
        core = self._prepare(optimizer)
        core.forget_if_edited(self, optimizer)
        if self._clipped is not None:  # On all ranks of a mesh, whatever gradients they have.
            if _are_as_they_were(optimizer, self._clipped[0]):
                core.apply_clips(self, optimizer)
            core.forget(self, optimizer)
        return core

    def _note_clipped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._clipped is not None:
            self._clipped = (_versions_of(optimizer), self._clipped[1])

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._core.check_unscaled(self, optimizer):
            self._check_subclasses(optimizer)

    def _reaches_all(self, mesh: Any, norm_type: float) -> bool:
        """Whether a norm over a mesh is known to all ranks that have to agree."""
        if self._group is None:
            return False
        ranks = torch.distributed.get_process_group_ranks
        wanted = set(ranks(self._group))
        return any(
            entry.members is None and wanted <= set(ranks(entry.group))
            for entry in shard_groups("clip_grad_norm_", mesh, norm_type)
        )

    def clip_grad_value_(self, clip_value: float) -> None:
        """Brings every element of the gradients within [-clip_value, clip_value], in the step.

        After a clip by norm, if that was asked for first.

        Args:
            clip_value: Largest magnitude that is left, at least 0.

        Raises:
            ValueError: It is below 0.
        """
        clip_value = float(clip_value)
        if not clip_value >= 0:
            raise ValueError(f"clip_grad_value_: expected clip_value >= 0, got {clip_value}")
        optimizer = self._guarded("clip_grad_value_")
        core = self._begin_clip(optimizer)
        while (
            todo := core.clip_value(self, optimizer, clip_value, True, True)
        ) != _C.ClipNext.NOTHING:
            self._check(optimizer)
            core.apply_clips(self, optimizer)
            if todo == _C.ClipNext.APPLY:
                break
        self._note_clipped(optimizer)

    # -- what is reported of steps

    def _synchronized(self) -> _C.ScalerCore | None:
        if self._kept_core is not None:
            self._settle(True)
        return self._kept_core

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. Waits for the device only if it is still at it."""
        core = self._synchronized()
        return core is not None and core.skipped

    @property
    def skipped_in_a_row(self) -> int:
        """Number of steps skipped in a row until now. Waits as :attr:`step_was_skipped`."""
        core = self._synchronized()
        return self._loaded.skipped_in_a_row if core is None else core.skipped_in_a_row

    def overflow_report(self, named_parameters: Any = None) -> OverflowReport:
        """Reports which gradients were inf or NaN at the last skipped step.

        None, if that was skipped for its loss or norm. Clipping by foreign code before the step
        makes NaN of all gradients when their norm is NaN: :meth:`clip_grad_norm_` does not.

        With a ``group``, and only if a step was skipped, every member has to call this: the first
        gets the gradients of all, with their ranks, as it does from
        :meth:`fastamp.GradScaler.overflow_report`.

        Args:
            named_parameters: As for :meth:`fastamp.GradScaler.overflow_report`.

        Raises:
            TypeError: ``named_parameters`` is not iterable.
        """
        report = self._own_report(names_by_identity(named_parameters))
        return report if self._group is None else gathered(report, self._group)

    def _own_report(self, names: dict[int, str]) -> OverflowReport:
        core = self._synchronized()
        found = None if core is None else core.overflow([])
        if found is None:
            return self._loaded.report or OverflowReport()
        step, _, optimizers = found
        return make_report(step, None, optimizers, names)

    def history(self) -> list[StepRecord]:
        """Returns the last ``history_size`` steps, oldest first; the scale is 1.

        ``norm`` is known where gradients are plain tensors, or :meth:`clip_grad_norm_` was called.
        Waits for the device.
        """
        core = self._kept_core
        return (
            list(self._loaded.history)
            if core is None
            else [StepRecord(*row) for row in core.history()]
        )

    def register_on_skip(self, hook: SkipHook, *, wait: bool = False) -> RemovableHandle:
        """Calls a function for each skipped step, as ``GradScaler.register_on_skip`` does.

        Args:
            hook: ``hook(optimizer, scale, record)``, with a scale of 1. On the CPU it is called by
                the step itself, on CUDA by the first step or question that finds the skip there.
            wait: Make ``step`` wait for the device, so that the hook is called before it returns.

        Returns:
            A handle with ``remove()``.

        Raises:
            TypeError: ``hook`` is not callable, or ``wait`` is no bool.
        """
        return self._add_skip_hook("register_on_skip", "hook", hook, wait)

    def _add_skip_hook(self, function: str, argument: str, hook: Any, wait: Any) -> RemovableHandle:
        hooks = SkipHooks() if self._hooks is None else self._hooks
        handle = hooks.add(function, argument, hook, wait)
        if self._hooks is None and self._kept_core is not None:
            self._kept_core.notify_skips(weakly(self._notify_of_skip))
        self._hooks = hooks
        return handle

    def restore_on_skip(self, module: torch.nn.Module) -> RemovableHandle:
        """Puts running statistics back when a step is skipped, from the next iteration on.

        A forward pass changes the statistics of batch norms, and a NaN in it makes NaN of them,
        whether the step is skipped or not. They become what they were before the first forward pass
        in training since the step before, on the device; nothing waits. They are copied once in
        each iteration.

        Args:
            module: Whose norms are meant: the one that the program calls.

        Returns:
            A handle with ``remove()``.

        Raises:
            TypeError: It is no module.
            ValueError: It has no norm with running statistics.
        """
        statistics = self._statistics or RestoredStatistics()
        handle = statistics.add("restore_on_skip", module)
        self._statistics = statistics
        return handle

    def _notify_of_skip(
        self, optimizer: Any, step: int, scale: float, norm: float, growth_tracker: int
    ) -> None:
        assert self._hooks is not None
        self._hooks.notify(optimizer, StepRecord(step, scale, True, norm, growth_tracker))

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs, as numbers, lists and strings. Waits for the device.

        Returns:
            "history" and "skipped_in_a_row", "overflow_report" (of this rank) or ``None``, and
            "spike": the "norms" and their "count" that the rule remembers, or ``None``.
        """
        report = self._own_report({})
        spike = None
        if self._spike is not None:
            norms, count = self._spike.state()
            spike = {"norms": norms, "count": count}
        return {
            "history": [tuple(row) for row in self.history()],
            "skipped_in_a_row": self.skipped_in_a_row,
            "overflow_report": report.as_dict() if report else None,
            "spike": spike,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state. Options stay as they are.

        Args:
            state_dict: What :meth:`state_dict` returned. Norms are ignored by a guard that skips no
                spikes; without any, one that does begins anew.

        Raises:
            ValueError: An entry is missing or has another form, or the norms are not of this
                guard's ``spike_of`` and ``spike_window``. Nothing was changed.
        """
        past = checked_guard_past(state_dict)
        norms, count = checked_norms(state_dict)
        if self._spike is not None:
            self._spike.load(norms, count)
        self._loaded = past
        if self._kept_core is not None:
            self._kept_core.load(1.0, list(past.history), past.skipped_in_a_row)

    def __repr__(self) -> str:
        """Says whose guard it is."""
        optimizer = self._optimizer()
        return f"<StepGuard of {'nothing' if optimizer is None else type(optimizer).__name__}>"


_guards: weakref.WeakKeyDictionary[Any, StepGuard] = weakref.WeakKeyDictionary()


@_disable_dynamo
def _step_uncompiled(
    guard: StepGuard, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return guard._step(plain, args, kwargs)


def guard_of(optimizer: Any) -> StepGuard | None:
    """The guard of an optimizer, if it has one."""
    return _guards.get(optimizer)


def core_of_guard(guard: StepGuard) -> _C.ScalerCore:
    """The native core of a guard, made now if it is not there yet. Called by log_to."""
    return guard._core_for_log()
