# SPDX-License-Identifier: Apache-2.0
"""A whole training step, forward to update, as one CUDA graph."""

from __future__ import annotations

import operator
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

import fastamp._C as _C
from fastamp._autocast.region import autocast
from fastamp._scaler.grad_scaler import GradScaler
from fastamp._scaler.gradients import parameters_of
from fastamp._scaler.state import (
    captured_values,
    core_of,
    lend_counters,
    note_replay,
    prepare_replay,
    unscale_once,
)
from fastamp._scaler.steps import FUSABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def _call_model(model: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


class GraphedStep:
    """A training step made by :func:`graphed_step`; call it with a batch. Not thread-safe."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        scaler: GradScaler,
        sample_inputs: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        """Checks the arguments and captures the step on CUDA; see :func:`graphed_step`."""
        self.model, self.loss_fn = model, loss_fn
        self.optimizer, self.scaler = optimizer, scaler
        self.autocast: bool = options["autocast"]
        self.dtype: torch.dtype | None = options["dtype"]
        self.clip_value: float | None = options["clip_value"]
        self.warmup: int = options["warmup"]
        self.accumulation: int = options["accumulation"]
        self.max_norm: float | None = options["max_norm"]
        self.device = next(p.device for g in optimizer.param_groups for p in g["params"])
        self._leaves, self._structure = pytree.tree_flatten(tuple(sample_inputs))
        self._replay: _Replay | None = None
        if self.device.type == "cuda":
            make_capturable(optimizer)
            self._replay = _Replay(self)

    def __call__(self, *batches: Any) -> Tensor:
        """Trains on one batch.

        Args:
            *batches: Inputs like ``sample_inputs``: same structure, shapes and dtypes. With
                ``accumulation`` above 1, that many tuples of such inputs.

        Returns:
            The unscaled loss, the mean over the batches: a detached scalar tensor.

        Raises:
            ValueError: Inputs do not fit ``sample_inputs``. Nothing was changed.
        """
        checked = self.check_batches(batches)
        return self.run(checked) if self._replay is None else self._replay(checked)

    def check_batches(self, batches: tuple[Any, ...]) -> list[list[Any]]:
        """Returns the leaves of each batch."""
        if self.accumulation == 1:
            batches = (batches,)
        if len(batches) != self.accumulation:
            raise ValueError(
                f"graphed_step: expected {self.accumulation} batches, got {len(batches)}"
            )
        return [self._check_batch(batch) for batch in batches]

    def _check_batch(self, batch: Any) -> list[Any]:
        leaves, structure = pytree.tree_flatten(tuple(batch))
        if structure != self._structure:
            raise ValueError(
                "graphed_step: expected inputs of the structure of sample_inputs, got "
                f"{structure.num_leaves} leaves for {self._structure.num_leaves} in another one"
            )
        for leaf, sample in zip(leaves, self._leaves, strict=True):
            if isinstance(sample, torch.Tensor):
                fits = (
                    isinstance(leaf, torch.Tensor)
                    and leaf.shape == sample.shape
                    and leaf.dtype == sample.dtype
                )
                wanted: Any = f"a tensor of shape {tuple(sample.shape)} and {sample.dtype}"
            else:
                fits, wanted = bool(leaf == sample), repr(sample)
            if not fits:
                got = (
                    f"shape {tuple(leaf.shape)} and {leaf.dtype}"
                    if isinstance(leaf, torch.Tensor)
                    else repr(leaf)
                )
                raise ValueError(f"graphed_step: expected {wanted} as in sample_inputs, got {got}")
        return leaves

    def run(self, batches: list[list[Any]]) -> Tensor:
        """Runs the step: what is captured on CUDA, and all there is elsewhere."""
        loss = self._backward(batches, self.scaler)
        self._clip(self.scaler)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def warm_up(self, batches: list[list[Any]]) -> None:
        """Creates states and workspaces by steps that change neither parameters nor states.

        They are skipped by a raised flag and not by what the gradients are: hooks may clean them.
        """
        scaler = GradScaler(self.device.type, process_group=self.scaler.process_group)
        if self.scaler.is_enabled():
            lend_counters(self.scaler, scaler)
        skip = torch.ones((), dtype=torch.float32, device=self.device)
        for _ in range(self.warmup):
            self._backward(batches, scaler)
            self._clip(scaler)
            unscale_once(scaler, self.optimizer)
            self.optimizer._fastamp_amp_step(  # type: ignore[attr-defined]
                _C.AmpStep(found_inf=skip, write_grads=False), _C.has_observers()
            )
            scaler.update()

    def _backward(self, batches: list[list[Any]], scaler: GradScaler) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        for leaves in batches:
            inputs = pytree.tree_unflatten(leaves, self._structure)
            with autocast(self.device.type, self.dtype, enabled=self.autocast):
                loss = self.loss_fn(_call_model(self.model, inputs[0]), *inputs[1:])
            if self.accumulation > 1:
                loss = loss / self.accumulation
            scaler.scale(loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def _clip(self, scaler: GradScaler) -> None:
        if self.max_norm is not None:
            scaler.clip_grad_norm_(self.optimizer, self.max_norm)
        if self.clip_value is not None:
            scaler.clip_grad_value_(self.optimizer, self.clip_value)


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimizer one whose step can be captured, or refuses it.

    Its learning rates become tensors on the device, which LR schedulers write in place.
    """
    from fastamp.optim import fuse_

    if type(optimizer) in FUSABLE:
        fuse_(optimizer)
    if getattr(optimizer, "_fastamp_supports_amp_step", False) is not True:
        raise TypeError(
            "graphed_step: expected optimizer to be an SGD, Adam, AdamW or Muon of fastamp.optim "
            f"or torch.optim, got {type(optimizer).__name__}"
        )
    for group in optimizer.param_groups:
        _keep_rate(group, torch.empty((), device=group["params"][0].device))


def _keep_rate(group: dict[str, Any], tensor: Tensor) -> None:
    rate = group["lr"]
    if isinstance(rate, torch.Tensor) and rate.device == tensor.device:
        return
    tensor.fill_(float(rate))
    group["lr"] = tensor


def _constant(value: Any) -> Any:
    # Tensors by what they are, not by what is in them: to read that would wait for the device.
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, (tuple, list)):
        return [_constant(entry) for entry in value]
    return value


def constants_of(optimizer: torch.optim.Optimizer) -> Any:
    """Returns the options that a captured step of an optimizer takes for good.

    All but the learning rate, which is read through its tensor, and what LR schedulers note.
    """
    return [
        [
            (name, _constant(value))
            for name, value in group.items()
            if name not in ("params", "lr", "initial_lr")
        ]
        for group in optimizer.param_groups
    ]


def _keep_for_stream(optimizer: torch.optim.Optimizer, stream: torch.cuda.Stream) -> None:
    """Notes that states, whichever stream they were made on, are used by replays on another.

    Freed states would else be handed out again, on their stream, before a replay has read them.
    """
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(stream)


class _Replay:
    """The captured step with its static inputs."""

    CAPTURES_BEFORE_WARNING = 3

    def __init__(self, step: GraphedStep) -> None:
        """Captures the step; parameters, states, buffers and generators are left as they were."""
        self.step = step
        self.scaler = step.scaler if step.scaler.is_enabled() else None
        self.inputs = [
            [
                leaf.to(step.device).clone() if isinstance(leaf, torch.Tensor) else leaf
                for leaf in batch
            ]
            for batch in [step._leaves] * step.accumulation
        ]
        self.captures = 0
        self.capture()

    def capture(self) -> None:
        """Captures anew, as options and tensors are now."""
        step, scaler = self.step, self.scaler
        self.modules = list(step.model.modules())
        self.parameters = parameters_of(step.optimizer)
        self.rates = [group["lr"] for group in step.optimizer.param_groups]
        if scaler is not None:
            prepare_replay(scaler, step.device)
        buffers = [buffer.clone() for buffer in step.model.buffers()]
        generator = torch.cuda.get_rng_state(step.device)
        new_stream: Any = torch.cuda.Stream
        stream = new_stream(step.device)
        stream.wait_stream(torch.cuda.current_stream(step.device))
        with torch.cuda.stream(stream):
            step.warm_up(self.inputs)
        torch.cuda.current_stream(step.device).wait_stream(stream)
        _keep_for_stream(step.optimizer, torch.cuda.current_stream(step.device))
        for buffer, kept in zip(step.model.buffers(), buffers, strict=True):
            buffer.copy_(kept)
        torch.cuda.set_rng_state(generator, step.device)
        step.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        # On the step's device, whichever is current; and only calls of this thread can break the
        # capture: a loader that pins memory, or NCCL's watchdog, may be at work.
        capture: Any = torch.cuda.graph
        mode = "thread_local"
        with (
            torch.cuda.device(step.device),
            capture(self.graph, stream=stream, capture_error_mode=mode),
        ):
            self.loss = step.run(self.inputs)
        self.captured = None if scaler is None else core_of(scaler).take_captured()
        self.key = self._key()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.written = _C.WrittenTensors([*self.parameters, *gradients, *step.model.buffers()])
        self.captures += 1

    def _key(self) -> Any:
        # All that is a constant of the graph.
        step = self.step
        sizes = [len(group["params"]) for group in step.optimizer.param_groups]
        modes = [module.training for module in self.modules]
        of_scaler = None if self.scaler is None else captured_values(self.scaler)
        return constants_of(step.optimizer), sizes, modes, of_scaler

    def _is_current(self) -> bool:
        """Whether the capture still stands for the step. Costs 18 us with 300 parameters."""
        parameters = parameters_of(self.step.optimizer)
        return self._key() == self.key and all(map(operator.is_, parameters, self.parameters))

    def __call__(self, batches: list[list[Any]]) -> Tensor:
        """Replays the step for new inputs."""
        step = self.step
        for group, rate in zip(step.optimizer.param_groups, self.rates, strict=True):
            _keep_rate(group, rate)
        if not self._is_current():
            self._capture_again()
        for inputs, leaves in zip(self.inputs, batches, strict=True):
            for held, leaf in zip(inputs, leaves, strict=True):
                if isinstance(held, torch.Tensor):
                    held.copy_(leaf, non_blocking=True)  # towards the graph's device
        if self.scaler is not None:
            prepare_replay(self.scaler, step.device)
        self.graph.replay()
        # A replay counts no in-place edits, and caches of casts and norms are keyed on them.
        self.written.increment_versions()
        if self.scaler is not None and self.captured is not None:
            note_replay(self.scaler, self.captured)
        return self.loss.clone()

    def _capture_again(self) -> None:
        self.capture()
        if self.captures == self.CAPTURES_BEFORE_WARNING:
            warnings.warn(
                f"graphed_step: the step was captured {self.captures} times, because options of "
                "the optimizer or the scaler, or train and eval mode, have changed. Each capture "
                "costs many steps. Of the optimizer's options only the learning rate may change "
                "at no cost; a scheduler that moves momentum or betas, as OneCycleLR does by "
                "default, needs cycle_momentum=False.",
                stacklevel=4,
            )


def _check_options(options: dict[str, Any]) -> None:
    dtype = options["dtype"]
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise ValueError(
            "graphed_step: expected dtype to be torch.float16 or torch.bfloat16, got "
            f"{dtype}. Say autocast=False for a step without an autocast region."
        )
    if dtype is not None and not options["autocast"]:
        raise ValueError(f"graphed_step: expected no dtype with autocast=False, got {dtype}")
    for name in ("accumulation", "warmup"):
        count = options[name]
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"graphed_step: expected {name} to be an int >= 1, got {count!r}")
    for name in ("max_norm", "clip_value"):
        limit = options[name]
        if limit is not None and not limit >= 0:
            raise ValueError(f"graphed_step: expected {name} >= 0 or None, got {limit!r}")


def graphed_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
    sample_inputs: tuple[Any, ...],
    *,
    autocast: bool = True,
    dtype: torch.dtype | None = None,
    accumulation: int = 1,
    max_norm: float | None = None,
    clip_value: float | None = None,
    warmup: int = 3,
) -> GraphedStep:
    """Makes a training step that runs as one CUDA graph, with the loss scale moving.

    The step is ``zero_grad``, forward under autocast, loss, scaled ``backward``, clipping, ``step``
    and ``update``; a call replays it for new inputs and costs the host one launch. LR schedulers
    act, the scale goes up and down, and a step that overflows is skipped, all on the device. What
    is a constant of the graph (other hyperparameters, the scaler's factors, train or eval mode) is
    watched, and the step is captured anew when it changes. On the CPU the same step runs eagerly.
    Inputs in pinned memory are read when the device comes to the step: do not write them before,
    unless something has waited for it.

    Args:
        model: Its parameters are on one device. On CUDA it must be capturable: static shapes, no
            host synchronisation.
        loss_fn: Called as ``loss_fn(output, *targets)``; returns a scalar tensor.
        optimizer: Of ``fastamp.optim``, or torch's SGD, Adam, AdamW or Muon, which is then given to
            ``fastamp.optim.fuse_``. On CUDA its learning rates become tensors. Any on the CPU.
        scaler: May be disabled, for bfloat16.
        sample_inputs: A batch as calls will have it: what the model takes (a tensor, or a tuple or
            dict of arguments) and the targets.
        autocast: Whether the forward pass runs in an autocast region.
        dtype: Of that region, float16 or bfloat16; ``None``: the device's default.
        accumulation: Batches per step; gradients are those of the mean of their losses.
        max_norm: Clip gradients by this 2-norm; ``None``: do not.
        clip_value: Then clip their elements to this magnitude; ``None``: do not.
        warmup: Steps before the capture that make states and workspaces. CUDA only.

    Returns:
        The step. Capturing it has changed neither parameters nor states; on CUDA gradients were
        dropped.

    Raises:
        TypeError: ``optimizer`` cannot be captured, or an argument has a wrong type.
        ValueError: A number is out of range, ``dtype`` is another one or given with
            ``autocast=False``, or ``sample_inputs`` is empty.
    """
    if not isinstance(scaler, GradScaler):
        raise TypeError(
            f"graphed_step: expected scaler to be a fastamp.GradScaler, got {type(scaler).__name__}"
        )
    if not isinstance(sample_inputs, (tuple, list)) or not sample_inputs:
        raise ValueError(
            "graphed_step: expected sample_inputs to be a tuple of the model's input and the "
            f"targets, got {sample_inputs!r:.100}"
        )
    options = {
        "autocast": autocast,
        "dtype": dtype,
        "accumulation": accumulation,
        "max_norm": max_norm,
        "clip_value": clip_value,
        "warmup": warmup,
    }
    _check_options(options)
    return GraphedStep(model, loss_fn, optimizer, scaler, tuple(sample_inputs), options)
