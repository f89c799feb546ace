# SPDX-License-Identifier: Apache-2.0
"""The rules that single op calls show."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import fastamp._C as _C
from fastamp._debug.check.rules import Findings
from fastamp._debug.watch.flops import flops_of
from fastamp._debug.watch.modules import address, is_half
from fastamp._debug.watch.op_calls import OpCall
from fastamp._policy.table import LOWERING

# Two sixteen-bit numbers of this size are neighbours at a distance of about a quarter: a softmax of
# logits that are wrong by so much is wrong by that share.
_LARGEST_LOGIT_ERROR = 0.25
_LONG_SUM = 4096
_FP16_MAX = 65504.0
# Of products that run in fp32 in a step that has others in 16 bits.
_WIDE_SHARE = 0.2
_LEAST_FLOPS = 1e6

# Ops whose own kernels do all arithmetic in fp32 (native_layer_norm and the like) are not here.
_NORMS = {
    "var.correction",
    "var.dim",
    "var",
    "std.correction",
    "std.dim",
    "std",
    "var_mean.correction",
    "linalg_vector_norm",
    "norm.ScalarOpt_dim",
    "norm.Scalar",
    "pow.Tensor_Scalar",
}
_SOFTMAXES = {"_softmax", "_log_softmax", "logsumexp"}
_ANGLES = {"cos", "sin", "cos_", "sin_"}
_SUMS = {"sum", "sum.dim_IntList", "mean", "mean.dim", "cumsum", "logcumsumexp", "nansum"}
_ADDS = {"add.Tensor", "add.Scalar", "add_.Tensor", "add_.Scalar", "clamp_min", "clamp_min_"}
_CONSTANTS = {
    "mul",
    "mul_",
    "add",
    "add_",
    "sub",
    "sub_",
    "masked_fill",
    "masked_fill_",
    "full",
    "fill",
    "fill_",
    "full_like",
    "new_full",
    "where",
    "scalar_tensor",
}

_Work = Counter[tuple[str, str, str]]


class OpRules:
    """Looks at each op call before and after it runs, in forward passes."""

    def __init__(self, findings: Findings) -> None:
        """Reports to ``findings``."""
        self._findings = findings
        self.ran_fp16 = False
        self.ran_bf16 = False
        # FLOPs of products by op, module and why they ran in fp32, "" if not: of this step,
        # of all from the first to the last step that had some in 16 bits, and of those since.
        self._flops, self._mixed, self._wide = _Work(), _Work(), _Work()
        self._widened: dict[int, torch.dtype] = {}

    def before(self, call: OpCall) -> None:
        """The rules on arguments: the call may be refused for them."""
        if call.autocast is not None and call.autocast[2] in LOWERING and not call.is_cast:
            self.ran_fp16 |= any(t.dtype is torch.float16 for t in call.tensors)
            self.ran_bf16 |= any(t.dtype is torch.bfloat16 for t in call.tensors)
        if call.backward or call.func.namespace != "aten":
            return
        op = call.op
        if op.partition(".")[0] in _CONSTANTS:
            self._look_at_constants(call)
        if op in _ADDS:
            self._look_at_eps(call)
        if op in _SOFTMAXES:
            self._look_at_logits(call)
        if op in _ANGLES:
            self._look_at_angles(call)

    def after(self, call: OpCall, result: Any) -> None:
        """The rules on results."""
        if call.backward or call.func.namespace != "aten":
            return
        if call.op in _SUMS:
            self._look_at_sum(call, result)
        if call.op in _NORMS:
            self._look_at_norm(call, result)
        self._follow_widened(call, result)
        self._count_product(call, result)

    def end_step(self) -> None:
        """Ends a step: a run in fp32 ahead of one in 16 bits, or after it, is no part of that."""
        if any(not why for _, _, why in self._flops):
            self._mixed += self._wide + self._flops
            self._wide.clear()
        elif self._mixed:
            self._wide += self._flops
        self._flops.clear()

    def conclude(self) -> None:
        """The rule on products that ran in fp32 beside others in 16 bits."""
        self.end_step()
        total = sum(self._mixed.values())
        if not (self.ran_fp16 or self.ran_bf16) or total < _LEAST_FLOPS:
            return
        wide = {key: flops for key, flops in self._mixed.items() if key[2]}
        if sum(wide.values()) < _WIDE_SHARE * total:
            return
        for (op, module, why), flops in sorted(wide.items(), key=lambda item: -item[1]):
            where = f"{op} in {module}" if module else op
            what = f"{100 * flops / total:.0f} % of the work of products, {why}"
            self._findings.add("products-in-fp32", where, what)

    def _count_product(self, call: OpCall, result: Any) -> None:
        flops = flops_of(call.func, call.args, call.kwargs, result)
        if not flops or not torch.is_grad_enabled():
            return  # An optimizer's, or an evaluation's.
        why = ""
        if all(t.dtype is torch.float32 for t in call.tensors if t.is_floating_point()):
            policy = call.autocast[2] if call.autocast else "pass"
            if policy != "pass" or (not call.region and _C.region_depth()):
                return  # As a list or the program has it: that, or a policy, has switched it off.
            why = "an op that autocast does not name" if call.region else "outside of a region"
        self._flops[call.op, call.module, why] += flops

    def _follow_widened(self, call: OpCall, result: Any) -> None:
        """Knows fp32 tensors that were 16-bit ones: their values are as rough."""
        if not isinstance(result, torch.Tensor) or call.is_view:
            return
        if call.op == "_to_copy" and is_half(call.args[0]) and result.dtype is torch.float32:
            self._widened[address(result)] = call.args[0].dtype
        else:
            self._widened.pop(address(result), None)

    def _look_at_angles(self, call: OpCall) -> None:
        angles = call.args[0]
        if angles.is_meta or angles.numel() == 0:
            return
        dtype = angles.dtype if is_half(angles) else self._widened.get(address(angles))
        if dtype is None:
            return
        greatest = angles.detach().float().abs().nan_to_num(0.0, 0.0, 0.0).max().item()
        error = greatest * torch.finfo(dtype).eps / 2
        if error >= _LARGEST_LOGIT_ERROR:
            name = str(dtype).removeprefix("torch.")
            what = f"angles up to {greatest:.4g} in {name}, rounded by up to {error:.2g}"
            self._findings.add("positions-in-16-bits", self._where(call), what)

    def _where(self, call: OpCall) -> str:
        return f"{call.op} in {call.module}" if call.module else call.op

    def _look_at_constants(self, call: OpCall) -> None:
        dtype = call.kwargs.get("dtype")
        tensors = call.tensors
        # Of mul and add the result has the tensors' dtype; without one it is what was asked for.
        is_fp16 = dtype is torch.float16 or (
            dtype is None
            and any(t.dim() for t in tensors)
            and all(t.dtype in (torch.float16, torch.bool) for t in tensors if t.dim())
            and any(t.dtype is torch.float16 for t in tensors)
        )
        if not is_fp16:
            return
        for leaf in tree_leaves((call.args, call.kwargs)):
            value = self._number(leaf)
            if value is not None and math.isfinite(value) and abs(value) > _FP16_MAX:
                self._findings.add("mask-beyond-fp16", self._where(call), f"{value:g} in float16")

    @staticmethod
    def _number(leaf: Any) -> float | None:
        if isinstance(leaf, bool):
            return None
        if isinstance(leaf, (int, float)):
            return float(leaf)
        # masked_fill and where take numbers as tensors without dimensions, too.
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.device.type == "cpu":
            return float(leaf) if leaf.dtype in (torch.float32, torch.float64) else None
        return None

    def _look_at_eps(self, call: OpCall) -> None:
        if not call.args or not is_half(call.args[0]):
            return
        eps = call.args[1] if len(call.args) > 1 else call.kwargs.get("other")
        value = self._number(eps)
        if value is None or not 0 < value < 1:
            return
        dtype = call.args[0].dtype
        if torch.tensor(value, dtype=dtype).item() == 0:
            name = str(dtype).removeprefix("torch.")
            self._findings.add("eps-is-zero", self._where(call), f"{value:g} is 0 in {name}")

    def _look_at_logits(self, call: OpCall) -> None:
        logits = call.args[0]
        if not is_half(logits) or logits.numel() == 0 or logits.is_meta:
            return
        # Masked ones are at the end of the range or -inf, whatever their rounding.
        limit = torch.finfo(logits.dtype).max / 2
        magnitudes = logits.detach().float().abs()
        if bool(torch.isnan(magnitudes).any() | torch.isposinf(logits).any()):
            return  # They have overflowed: that is the cause, and none of softmax's.
        counted = magnitudes[magnitudes < min(limit, 1e4)]
        greatest = counted.max().item() if counted.numel() else 0.0
        error = greatest * torch.finfo(logits.dtype).eps / 2
        if error >= _LARGEST_LOGIT_ERROR:
            name = str(logits.dtype).removeprefix("torch.")
            self._findings.add(
                "softmax-in-16-bits",
                self._where(call),
                f"logits up to {greatest:.4g} in {name}, rounded by up to {error:.2g}",
            )

    def _look_at_sum(self, call: OpCall, result: Any) -> None:
        summed = call.args[0]
        if not is_half(summed) or not is_half(result) or result.numel() == 0:
            return
        if call.op in ("cumsum", "logcumsumexp"):
            length = summed.shape[call.args[1]] if summed.dim() else 1
        else:
            length = summed.numel() // result.numel()
        if length > _LONG_SUM:
            name = str(summed.dtype).removeprefix("torch.")
            self._findings.add(
                "long-sum-in-16-bits", self._where(call), f"{length} elements in {name}"
            )

    def _look_at_norm(self, call: OpCall, result: Any) -> None:
        given = call.args[0]
        first = next((t for t in tree_leaves(result) if isinstance(t, torch.Tensor)), None)
        if not is_half(given) or first is None or not is_half(first) or given.numel() == 0:
            return
        if call.op == "pow.Tensor_Scalar":
            if call.args[1] != 2 or given.dtype is not torch.float16:
                return
            lost = first.isinf() & given.isfinite()
            if not lost.any():
                return
            what = f"squares of numbers up to {given.detach().float().abs().max().item():.4g}"
        else:
            what = "statistics"
            if given.dtype is torch.bfloat16 and not self._cancels(given, first):
                return
        name = str(given.dtype).removeprefix("torch.")
        self._findings.add("norm-in-16-bits", self._where(call), f"{what} in {name}")

    @staticmethod
    def _cancels(given: torch.Tensor, found: torch.Tensor) -> bool:
        """Whether rounding the inputs alone makes a variance wrong: means far above spreads."""
        wide = given.detach().float()
        spread, mean = wide.std().item(), wide.mean().abs().item()
        return mean * torch.finfo(given.dtype).eps / 2 > 0.1 * spread or not bool(
            found.isfinite().all()
        )
