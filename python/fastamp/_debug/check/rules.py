# SPDX-License-Identifier: Apache-2.0
"""The rules of :func:`fastamp.debug.check`: names, reasons, fixes; and what a check has found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

from fastamp._debug.report import Report

__all__ = ["RULES", "Cause", "CheckReport", "Finding", "Findings", "Rule", "checked_ignore"]


class Rule(NamedTuple):
    """Rule: what is looked for, why it is a mistake, and what to do."""

    name: str
    reason: str
    fix: str
    needs_step: bool
    """Whether only a training step shows it."""


def _rule(name: str, reason: str, fix: str, needs_step: bool = True) -> Rule:
    return Rule(name, reason, fix, needs_step)


#: All rules by name, the most often met first.
RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        _rule(
            "nonfinite-input",
            "a tensor that came into the step had inf or NaN already: a batch, a label weight, a "
            "parameter or buffer that an earlier step has spoilt",
            "look at that batch (tensor.isfinite().all()) and leave it out; where a weight has it, "
            "go back to the last checkpoint, and find the step that wrote it",
        ),
        _rule(
            "overflow-in-16-bits",
            "a result is beyond what 16 bits hold (65504 in float16), and no loss scale changes "
            "that: the step is skipped each time",
            'that module in float32: [modules] "its name" = "fp32" in a file for --policy, or '
            "fastamp.policies.for_modules(model, {'its name': 'fp32'}); or a bfloat16 region; or "
            "smaller numbers before it, such as q / sqrt(d) ahead of q @ k",
        ),
        _rule(
            "nonfinite-in-fp32",
            "float32 makes inf or NaN of the same numbers: a log or sqrt of 0, a division by 0, "
            "numbers that grow from step to step, a row that a mask covers as a whole",
            "an eps or a clamp ahead of that op, a smaller learning rate, clipping; one position "
            "that is not masked",
        ),
        _rule(
            "step-without-scaler",
            "gradients with inf or NaN were stepped, and no gradient scaler was there to skip "
            "that: the weights are NaN from here on",
            "cure what the cause names; python -m fastamp --guard and fastamp.StepGuard skip such "
            "steps where there is no scaler",
        ),
        _rule(
            "loss-scaled-twice",
            "scale() was given a loss that carries a scale already, and the step divides by one: "
            "the update is that much too large",
            "scaler.scale(loss).backward() once for each loss",
        ),
        _rule(
            "loss-not-scaled",
            "backward began at a loss that scale() has not multiplied, or at the one that it was "
            "given: the step divides by a scale that is not there, and moves nearly nothing",
            "scaler.scale(loss).backward(): scale() returns the scaled loss, and changes none",
        ),
        _rule(
            "one-loss-unscaled",
            "of the losses whose gradients are added up, one was not multiplied by the scale: "
            "after the step's division it counts for nothing",
            "scaler.scale() for each of them, or for their sum",
        ),
        _rule(
            "gradients-divided-twice",
            "the program takes the scale out of the gradients, and the scaler does it once more: "
            "the update is the scale too small",
            "scaler.unscale_(optimizer) in place of the program's own division: the scaler "
            "remembers it",
        ),
        _rule(
            "gradients-zeroed",
            "the gradients that backward has made were set to 0 or None before the step",
            "optimizer.zero_grad() after scaler.step(optimizer), or before backward()",
        ),
        _rule(
            "step-after-unscale",
            "optimizer.step() after unscale_(): gradients with inf or NaN are stepped, too",
            "scaler.step(optimizer), which skips them and does not divide again",
        ),
        _rule(
            "unscale-inside-accumulation",
            "between micro-batches whose gradients are added up, unscale_() divides the first "
            "ones, or update() moves the scale: they no longer have one scale",
            "unscale_(), step() and update() once, after the last micro-batch",
        ),
        _rule(
            "new-scaler-each-step",
            "each scaler begins at the first scale: it never falls to one that fits",
            "make the scaler once, before the loop",
        ),
        _rule(
            "scaled-gradient-penalty",
            "the penalty is made of gradients that carry the scale, so it is the scale or its "
            "square too large",
            "inv = 1 / scaler.get_scale(); gradients = [g * inv for g in gradients] ahead of the "
            "norm",
        ),
        _rule(
            "checkpoint-without-scaler",
            "the optimizer's state is saved and the scaler's is not: after a restart the scale "
            "begins anew, and the first steps are skipped",
            'torch.save({..., "scaler": scaler.state_dict()}), and load_state_dict() at the start',
        ),
        _rule(
            "norm-statistics-not-finite",
            "a forward pass that overflowed went into the running statistics; the skipped step "
            "did not take that back, and evaluation is NaN from here on",
            "module.reset_running_stats() now; scaler.restore_on_skip(model), or that of a "
            "StepGuard, which puts them back when a step is skipped",
            needs_step=False,
        ),
        _rule(
            "half-weights-torch-optim",
            "torch.optim adds updates to 16-bit weights in 16 bits: those below half a unit are "
            "lost, and the loss stops falling too early",
            "fastamp.optim.fuse_(optimizer), which keeps fp32 masters; or fp32 weights in a region",
            needs_step=False,
        ),
        _rule(
            "fp16-without-scaler",
            "fp16 gradients below 6e-8 become 0",
            "scaler = fastamp.GradScaler(device), scaler.scale(loss).backward(), "
            "scaler.step(optimizer), scaler.update(); or a bfloat16 region",
        ),
        _rule(
            "scaler-without-fp16",
            "bfloat16 has the range of fp32: scaling saves nothing, and costs a pass over the "
            "gradients and skipped steps",
            "GradScaler(..., enabled=dtype == torch.float16)",
        ),
        _rule(
            "region-casts-nothing",
            "the region changes no dtype: the program runs as it would without it",
            "keep the weights in fp32 (no model.half(), .bfloat16() or torch_dtype=), and give the "
            "region the device that the tensors are on",
        ),
        _rule(
            "backward-in-region",
            "backward runs its own ops under autocast, other ones than in the forward pass; torch "
            "recommends against it",
            "leave the region before loss.backward()",
        ),
        _rule(
            "step-past-scaler",
            "the optimizer's own step was called, and its gradients still carry the loss scale: "
            "the update is that much too large, and a step with inf or NaN is not skipped",
            "scaler.step(optimizer) and scaler.update() in place of optimizer.step()",
        ),
        _rule(
            "clip-before-unscale",
            "the gradients still carry the loss scale: they are clipped by 1/scale of what was "
            "meant",
            "scaler.unscale_(optimizer) before clipping, or scaler.clip_grad_norm_(optimizer, ...)",
        ),
        _rule(
            "scheduler-on-skipped-step",
            "the learning rate moves on though the step was skipped",
            "if not scaler.step_was_skipped: scheduler.step()",
        ),
        _rule(
            "eps-is-zero",
            "eps rounds to 0 in the dtype that it is added in, and protects from nothing",
            "a larger eps (fp16: at least 6e-8, better 1e-4), or run that op or step in fp32",
            needs_step=False,
        ),
        _rule(
            "norm-in-16-bits",
            "squares of fp16 numbers above 256 are inf and those below 2e-4 are 0; statistics in "
            "16 bits stop moving",
            "compute the norm with x.float(), or fastamp.policies.override({op: 'fp32'}); keep "
            "running statistics in fp32",
        ),
        _rule(
            "softmax-in-16-bits",
            "the logits are so large that rounding them to 16 bits changes probabilities by a "
            "quarter or more",
            "fastamp.policies.override({'softmax.int': 'fp32'}), and scale q before the product",
        ),
        _rule(
            "positions-in-16-bits",
            "angles of sin or cos were rounded to 16 bits, by a quarter or more: positions that "
            "are far from each other look alike (fp16 from 512 on, bf16 from 64 on)",
            "fastamp.policies.for_modules(model, {'*': 'positions'}), or [modules] \"*\" = "
            '"positions" in a file for --policy; where a larger module or function computes '
            "them: with torch.autocast(device, enabled=False): positions.float() * "
            "frequencies.float()",
        ),
        _rule(
            "products-in-fp32",
            "a fifth or more of the work of matrix products, convolutions and attention runs in "
            "float32, beside others in 16 bits: they are slower, and take the memory",
            "run the forward pass as a whole in the region; for ops that autocast does not name, "
            "fastamp.policies.set('the op', 'lower'), or cast the arguments",
        ),
        _rule(
            "long-sum-in-16-bits",
            "the result of more than 4096 summands has 16 bits: in fp16 it overflows beyond 65504, "
            "in bf16 it keeps three digits",
            "x.float().sum(), or fastamp.policies.override({'sum': 'fp32'})",
        ),
        _rule(
            "mask-beyond-fp16",
            "the number is outside the range of fp16: it becomes inf or is refused, and a row that "
            "is masked as a whole becomes NaN",
            "torch.finfo(x.dtype).min in place of -1e9, or a bool mask",
        ),
        _rule(
            "dims-not-multiple-of-8",
            "tensor cores take 16-bit operands in groups of 8: such products run padded or slower",
            "round the size up, such as a vocabulary of 50257 to 50304",
            needs_step=False,
        ),
        _rule(
            "loss-in-16-bits",
            "the loss has 16 bits: sums of it lose digits, and the gradient starts with that "
            "rounding",
            "compute the loss inside the region, or from logits.float()",
        ),
        _rule(
            "bf16-second-moments",
            "second moments in bf16, rounded to nearest at beta2 > 0.99, grow and do not shrink: a "
            "step moves them by less than half a unit",
            'fastamp.optim with state_rounding="stochastic", fp32 moments, or beta2 <= 0.99',
            needs_step=False,
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One mistake.

    Attributes:
        rule: Name of the rule, as in ``ignore``.
        where: The module, parameter, optimizer or op.
        what: What was seen there.
        count: How often, at this place.
    """

    rule: str
    where: str
    what: str
    count: int = 1

    @property
    def reason(self) -> str:
        """Why it is a mistake."""
        return RULES[self.rule].reason

    @property
    def fix(self) -> str:
        """Returns what to do."""
        return RULES[self.rule].fix


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a step went wrong: where its numbers began not to be finite.

    Attributes:
        step: Number of the step from 0 on, among those that were looked at.
        outcome: ``"was skipped"`` or ``"stepped with non-finite gradients"``.
        op: The first op whose result was not finite, or that was given what was not; empty if it
            was not seen.
        module: The innermost module around it; empty outside.
        source: ``"file:line"``; in a backward pass, of what began it.
        backward: Whether a backward pass ran it.
        rule: The rule of ``check`` that it breaks; empty if the scaler will cure it.
        text: The line.
        is_meant: Whether the program has written inf or NaN itself, as a test of its skips does.
    """

    step: int
    outcome: str
    op: str
    module: str
    source: str
    backward: bool
    rule: str
    text: str
    is_meant: bool = False

    def __str__(self) -> str:
        """Returns the line."""
        return self.text


class Findings:
    """Collects what is found; the same rule at the same place counts up."""

    def __init__(self, ignore: Iterable[str] = ()) -> None:
        """Leaves out the rules of ``ignore``."""
        self._ignore = frozenset(ignore)
        self._found: dict[tuple[str, str], tuple[str, int]] = {}
        self._advice: dict[str, None] = {}
        self._cause: Cause | None = None

    def note_cause(self, cause: Cause) -> None:
        """Notes why a step went wrong; the first one stays."""
        self._cause = self._cause or cause

    def add(self, rule: str, where: str, what: str) -> None:
        """Notes a mistake."""
        first, count = self._found.get((rule, where), (what, 0))
        self._found[rule, where] = (first, count + 1)

    def count_of(self, rule: str) -> int:
        """How often the mistake was made so far, whether or not it is ignored."""
        return sum(count for (name, _), (_, count) in self._found.items() if name == rule)

    def advise(self, text: str) -> None:
        """Notes what is no mistake, and could be better."""
        self._advice[text] = None

    def wants(self, rule: str) -> bool:
        """Whether the rule is in force."""
        return rule not in self._ignore

    def report(self, has_step: bool) -> CheckReport:
        """Returns what was found, in the order of the rules."""
        order = list(RULES)
        found = [Finding(r, at, *seen) for (r, at), seen in self._found.items() if self.wants(r)]
        unchecked = [r.name for r in RULES.values() if r.needs_step and not has_step]
        return CheckReport(
            findings=tuple(sorted(found, key=lambda finding: order.index(finding.rule))),
            ignored=tuple(sorted(self._ignore)),
            unchecked=tuple(name for name in unchecked if name not in self._ignore),
            advice=tuple(self._advice),
            cause=self._cause,
        )


_ROWS_OF_A_RULE = 8


@dataclasses.dataclass(frozen=True)
class CheckReport(Report):
    """Report of :func:`fastamp.debug.check`; true if it found anything. Its ``str`` is for people.

    Attributes:
        findings: In the order of the rules.
        ignored: The rules that were silenced.
        unchecked: The rules that need a training step, where none was given.
        advice: Sentences on what is no mistake, and could be better; ``str`` leaves them out.
        cause: Why the first step that went wrong did: a step that was skipped, or stepped with
            gradients that are not finite. None if there is none.
    """

    kind: ClassVar[str] = "check"

    findings: tuple[Finding, ...]
    ignored: tuple[str, ...]
    unchecked: tuple[str, ...]
    advice: tuple[str, ...] = ()
    cause: Cause | None = None

    def __bool__(self) -> bool:
        """Whether anything was found."""
        return bool(self.findings)

    def __str__(self) -> str:
        """Returns the cause, one paragraph per rule, and a last line that counts findings."""
        lines = [f"cause: {self.cause}"] if self.cause else []
        for name in dict.fromkeys(finding.rule for finding in self.findings):
            found = [finding for finding in self.findings if finding.rule == name]
            lines += [name, f"  why: {RULES[name].reason}", f"  fix: {RULES[name].fix}"]
            for finding in found[:_ROWS_OF_A_RULE]:
                times = f" ({finding.count} times)" if finding.count > 1 else ""
                lines.append(f"  at {finding.where}: {finding.what}{times}")
            if len(found) > _ROWS_OF_A_RULE:
                lines.append(f"  and at {len(found) - _ROWS_OF_A_RULE} more places")
        rules = len({finding.rule for finding in self.findings})
        count = len(self.findings)
        last = f"{count} finding{'' if count == 1 else 's'}"
        if count:
            last += f" of {rules} rule{'' if rules == 1 else 's'}"
        if self.unchecked:
            last += f"; {len(self.unchecked)} rules need a step: check(..., step=...)"
        if self.ignored:
            last += f"; ignored: {', '.join(self.ignored)}"
        return "\n".join([*lines, last])

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        findings = [
            {**dataclasses.asdict(f), "reason": f.reason, "fix": f.fix} for f in self.findings
        ]
        return {
            "findings": findings,
            "ignored": list(self.ignored),
            "unchecked": list(self.unchecked),
            "advice": list(self.advice),
            "cause": dataclasses.asdict(self.cause) if self.cause else None,
        }


def checked_ignore(ignore: Iterable[str], function: str = "check") -> tuple[str, ...]:
    """Returns names of rules.

    Raises:
        TypeError: It is a string, or no list of names.
        ValueError: One is no rule's; the nearest are named.
    """
    import difflib

    if isinstance(ignore, str) or not isinstance(ignore, Iterable):
        raise TypeError(
            f"{function}: expected ignore to be names of rules, got "
            f"{type(ignore).__name__} {ignore!r}"
        )
    names = tuple(ignore)
    for name in names:
        if name not in RULES:
            near = difflib.get_close_matches(str(name), RULES, n=3, cutoff=0.4)
            hint = f"; nearest names: {', '.join(near)}"
            if not near:
                hint = "; python -m fastamp check --list shows their names"
            raise ValueError(f"{function}: expected ignore to name rules, got {name!r}{hint}")
    return names
