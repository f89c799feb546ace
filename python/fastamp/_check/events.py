# SPDX-License-Identifier: Apache-2.0
"""The rules on the order in which a training step calls things."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim.lr_scheduler import LRScheduler

from fastamp._check.ops import OpRules
from fastamp._check.rules import Findings
from fastamp._patches import Patches, all_subclasses
from fastamp._watch.modules import is_half
from fastamp._watch.op_calls import OpCall

_STAGE_READY = 0
_CASTS = ("weight_casts", "other_casts", "cache_hits", "activation_hits", "kept_hits")
# What clipping does to gradients: by norm, with a factor that is a tensor; by value.
_FACTORS = {"mul_.Tensor", "_foreach_mul_.Tensor"}
_BOUNDS = {
    "clamp_",
    "clamp_min_",
    "clamp_max_",
    "_foreach_clamp_min_.Scalar",
    "_foreach_clamp_max_.Scalar",
}


class StepRules:
    """Follows backward passes, clipping, scalers and LR schedulers inside a block.

    Args:
        findings: Where findings go.
        ops: The rules on ops, which see what ran in which dtype.
        scalers: The program's gradient scalers; may grow meanwhile, and does by those that scale.
        optimizers: Its optimizers; may grow meanwhile.
    """

    def __init__(
        self,
        findings: Findings,
        ops: OpRules,
        scalers: list[Any],
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        """Notes whom to follow."""
        self._findings = findings
        self._ops = ops
        self._scalers = scalers
        self._optimizers = optimizers
        self._regions: set[str] = set()
        self._backwards = 0

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Wraps what is to be noticed."""
        patches = Patches()
        patches.replace(torch.autograd, "backward", self._wrapped_backward(torch.autograd.backward))
        patches.replace(LRScheduler, "step", self._wrapped_schedule(LRScheduler.step))
        for cls in all_subclasses(TorchGradScaler):
            if "scale" in vars(cls):
                patches.replace(cls, "scale", self._wrapped_scale(vars(cls)["scale"]))
        try:
            yield
        finally:
            patches.undo()

    def _wrapped_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._look_at_backward(tensors)
            return original(tensors, *args, **kwargs)

        return backward

    def _look_at_backward(self, tensors: Any) -> None:
        self._backwards += 1
        for loss in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors):
            device = loss.device.type
            if torch.is_autocast_enabled(device):
                self._findings.add("backward-in-region", "backward()", f"a region on {device}")
            # A scaled loss was multiplied by an fp32 scale.
            unscaled = loss.grad_fn is not None and self._was_half(loss)
            if loss.dim() == 0 and (is_half(loss) or unscaled):
                self._findings.add("loss-in-16-bits", "backward()", "the loss has 16 bits")

    @staticmethod
    def _was_half(loss: torch.Tensor) -> bool:
        """Whether a 16-bit loss was multiplied by a scaler's fp32 scale."""
        node = loss.grad_fn
        if node is None or node.name() != "MulBackward0":
            return False
        made = [n for n, _ in node.next_functions if n is not None]
        metadata: Any = getattr(made[0], "_input_metadata", ()) if len(made) == 1 else ()
        return bool(metadata) and metadata[0].dtype in (torch.float16, torch.bfloat16)

    def _wrapped_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if all(each is not scaler for each in self._scalers):
                self._scalers.append(scaler)
            return original(scaler, *args, **kwargs)

        return scale

    def _wrapped_schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = getattr(scheduler, "optimizer", None)
            # torch calls it once when it is made.
            if optimizer is not None and getattr(scheduler, "_step_count", 0) >= 1:
                self._look_at_schedule(scheduler, optimizer)
            return original(scheduler, *args, **kwargs)

        return step

    def _look_at_schedule(self, scheduler: Any, optimizer: Any) -> None:
        for scaler in self._scalers:
            if getattr(scaler, "step_was_skipped_for", None) is None or not scaler.is_enabled():
                continue
            if scaler.step_was_skipped_for(optimizer):
                kind = type(scheduler).__qualname__
                self._findings.add("scheduler-on-skipped-step", f"{kind}.step()", "after a skip")

    def see(self, call: OpCall) -> None:
        """Looks at an op before it runs."""
        if call.op in _FACTORS or call.op in _BOUNDS:
            self._look_at_clip(call)
        self._regions |= call.regions
        if call.autocast is not None:
            self._regions.add(call.autocast[1])

    def _look_at_clip(self, call: OpCall) -> None:
        if call.backward:
            return
        if call.op in _FACTORS:
            factors = call.args[1] if isinstance(call.args[1], (list, tuple)) else [call.args[1]]
            if not all(isinstance(f, torch.Tensor) and f.dim() == 0 for f in factors):
                return
        written = call.args[0] if isinstance(call.args[0], (list, tuple)) else [call.args[0]]
        written_ids = {id(t) for t in written} | {
            t.data_ptr() for t in written if t.layout == torch.strided and t.numel()
        }
        for optimizer in list(self._optimizers):
            if self._carries_scale(optimizer) and any(
                p.grad is not None
                and (id(p.grad) in written_ids or p.grad.data_ptr() in written_ids)
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is None or p.grad.layout == torch.strided
            ):
                name = type(optimizer).__qualname__
                self._findings.add(
                    "clip-before-unscale", f"the gradients of {name}", f"by {call.op}"
                )

    def _carries_scale(self, optimizer: torch.optim.Optimizer) -> bool:
        for scaler in self._scalers:
            if not scaler.is_enabled() or getattr(scaler, "_scale", None) is None:
                continue
            states = vars(scaler)["_per_optimizer_states"]  # torch's name, which fastamp's has, too
            state = states.get(id(optimizer))
            if scaler.get_scale() != 1.0 and (
                state is None or state["stage"].value == _STAGE_READY
            ):
                return True
        return False

    def conclude(self, rows: list[dict[str, Any]]) -> None:
        """The rules on the whole.

        Args:
            rows: Those of a trace of the same time.
        """
        enabled = [s for s in self._scalers if s.is_enabled()]
        if self._ops.ran_fp16 and self._backwards and not enabled:
            self._findings.add("fp16-without-scaler", "the program", "backward of fp16 ops")
        used = [s for s in enabled if getattr(s, "_scale", None) is not None]
        if used and self._ops.ran_bf16 and not self._ops.ran_fp16:
            self._findings.add(
                "scaler-without-fp16", "GradScaler", "only bfloat16 regions ran lower ops"
            )
        lowered = [row for row in rows if row["policy"] in ("lower", "promote")]
        if self._regions and not any(row[name] for row in lowered for name in _CASTS):
            device = ", ".join(sorted(self._regions))
            dtypes = sorted({dtype for row in lowered for dtype in row["inputs"]})
            what = f"the arguments of its ops are {', '.join(dtypes)} already"
            if not lowered:
                what = "no op inside runs on its device and is in its lists"
            self._findings.add("region-casts-nothing", f"the region on {device}", what)
