# SPDX-License-Identifier: Apache-2.0
"""The rules on the order in which a training step calls things."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from fastamp._debug.check.op_rules import OpRules
from fastamp._debug.check.order_rules import OrderRules
from fastamp._debug.check.rules import Findings
from fastamp._debug.watch.calls import CallListener, listening
from fastamp._debug.watch.modules import is_half
from fastamp._debug.watch.op_calls import OpCall
from fastamp._debug.watch.scaled_gradients import ScaledGradients, carries_scale
from fastamp._policy.table import LOWERING
from fastamp._scaler.step_guard import guard_of
from fastamp._util.tool_guard import ToolGuard

_CASTS = ("weight_casts", "other_casts", "cache_hits", "activation_hits", "kept_hits")
# What clipping does to gradients: by norm, with a factor that is a tensor; by value.
_FACTORS = {"mul_.Tensor", "_foreach_mul_.Tensor"}
_SCALINGS = ("mul", "div", "_foreach_mul", "_foreach_div")
# What copies gradients: the op that writes them, too.
_COPIES = ("_to_copy", "clone", "copy", "_foreach_copy")
_BOUNDS = {
    "clamp_",
    "clamp_min_",
    "clamp_max_",
    "_foreach_clamp_min_.Scalar",
    "_foreach_clamp_max_.Scalar",
}


class StepRules(CallListener):
    """Follows backward passes, clipping, scalers and LR schedulers inside a block.

    Args:
        findings: Where findings go.
        ops: The rules on ops, which see what ran in which dtype.
        scalers: The program's gradient scalers; may grow meanwhile, and does by those that scale.
        optimizers: Its optimizers; may grow meanwhile.
        guard: Of the tool.
    """

    def __init__(
        self,
        findings: Findings,
        ops: OpRules,
        scalers: list[Any],
        optimizers: list[torch.optim.Optimizer],
        guard: ToolGuard,
    ) -> None:
        """Notes whom to follow."""
        self.guard = guard
        self._findings = findings
        self._ops = ops
        self._scalers = scalers
        self._optimizers = optimizers
        self._regions: set[str] = set()
        self._backwards = 0
        self._unguarded: set[str] = set()  # Kinds of optimizers.
        self._scaled = ScaledGradients(optimizers, guard)
        self._order = OrderRules(findings, self._scaled, optimizers, guard)
        self._disabled: set[str] = set()

    @contextlib.contextmanager
    def followed(self, *, this_thread: bool = False) -> Iterator[None]:
        """Follows what is called inside the block, by any thread or by this one alone."""
        with (
            listening(self, this_thread=this_thread),
            listening(self._scaled),
            listening(self._order, this_thread=this_thread),
        ):
            yield

    def made_region(self, region: Any, is_wanted: bool) -> None:
        """Notes regions that torch has disabled."""
        if is_wanted and not region._enabled:
            self._disabled.add(str(region.device))

    def before_backward(self, tensors: Any) -> None:
        """The rules on losses."""
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

    def before_scale(self, scaler: Any, outputs: Any) -> None:  # noqa: ARG002
        """Notes a scaler."""
        if all(each is not scaler for each in self._scalers):
            self._scalers.append(scaler)

    def before_optimizer_step(self, optimizer: Any, by_scaler: bool) -> None:
        """The rule on steps that a scaler should have made."""
        self._ops.end_step()
        if self._scaled.stepped is optimizer:
            kind = type(optimizer).__qualname__
            what = f"gradients times {self._scaled.scale:g}"
            self._findings.add("step-past-scaler", f"{kind}.step()", what)
        elif not by_scaler and guard_of(optimizer) is None:
            self._unguarded.add(type(optimizer).__qualname__)

    def before_schedule(self, scheduler: Any) -> None:
        """The rule on schedules."""
        optimizer = getattr(scheduler, "optimizer", None)
        # torch calls it once when it is made.
        if optimizer is not None and not scheduler._is_initial:
            self._look_at_schedule(scheduler, optimizer)

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

    def seen(self, call: OpCall, result: Any) -> None:
        """Looks at an op that has run."""
        self._order.see(call, result)
        name = call.op.partition(".")[0].removesuffix("_")
        if name in (*_SCALINGS, *_COPIES) and not call.backward:
            self._look_at_scaling(call, name, result)

    def _look_at_scaling(self, call: OpCall, name: str, result: Any) -> None:
        """Programs may take the scale out of gradients by themselves."""
        given: Any = call.args[0]
        by: Any = call.args[1] if len(call.args) > 1 else None
        if name in ("copy", "_foreach_copy"):
            given, result, by = by, given, None
        elif name == "mul" and isinstance(by, torch.Tensor) and by.dim() and _is_number(given):
            given, by = by, given  # inverse * gradient
        result = given if result is None else result  # of _foreach_mul_
        by = by[0] if isinstance(by, (list, tuple)) and by else by

        def factor() -> float:
            value = float(by.flatten()[0] if isinstance(by, torch.Tensor) else by)
            return 1.0 / (value or math.inf) if "div" in name else value

        self._scaled.multiplied(
            given if isinstance(given, (list, tuple)) else [given],
            result if isinstance(result, (list, tuple)) else [result],
            factor if name in _SCALINGS else None,
        )

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
            if self._scaled.is_divided(optimizer):
                continue  # by the program: that is what is wrong, or right
            if any(carries_scale(scaler, optimizer) for scaler in self._scalers) and any(
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

    def conclude(self, rows: list[dict[str, Any]]) -> None:
        """The rules on the whole.

        Args:
            rows: Those of a trace of the same time.
        """
        enabled = [s for s in self._scalers if s.is_enabled()]
        if self._unguarded and not enabled:
            self._findings.advise(
                f"no scaler checks the gradients of {', '.join(sorted(self._unguarded))}: a batch "
                "with a NaN ruins weights and moments; fastamp.StepGuard(optimizer), or python -m "
                "fastamp --guard, skips its step"
            )
        used = [s for s in enabled if getattr(s, "_scale", None) is not None]
        if self._ops.ran_fp16 and self._backwards and not used:
            self._findings.add("fp16-without-scaler", "the program", "backward of fp16 ops")
        if used and self._ops.ran_bf16 and not self._ops.ran_fp16:
            self._findings.add(
                "scaler-without-fp16", "GradScaler", "only bfloat16 regions ran lower ops"
            )
        lowered = [row for row in rows if row["policy"] in (*LOWERING, "promote")]
        casting = {row["device"] for row in lowered if any(row[name] for name in _CASTS)}
        for device in sorted(self._regions - casting):
            here = [row for row in lowered if row["device"] == device]
            dtypes = sorted({dtype for row in here for dtype in row["inputs"]})
            what = f"the arguments of its ops are {', '.join(dtypes)} already"
            if not here:
                what = "no op inside runs on its device and is in its lists"
            self._findings.add("region-casts-nothing", f"the region on {device}", what)
        for device in sorted(self._disabled if not casting else ()):
            what = f"torch has disabled it: no {device} here, or none that has its dtype"
            self._findings.add("region-casts-nothing", f"the region on {device}", what)
        self._ops.conclude()
        self._order.conclude(self._scalers)


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() == 0
