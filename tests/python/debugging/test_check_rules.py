# SPDX-License-Identifier: Apache-2.0
"""Each rule of the linter on the program that makes the mistake, and on the one that does not."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fastamp
from fastamp._debug.check import RULES

BF16, FP16 = torch.bfloat16, torch.float16


def network(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), **options)


def rules_of(report):
    return {finding.rule for finding in report.findings}


class Loop:
    """A training loop whose parts tests replace."""

    def __init__(self, dtype=BF16, model=None, optimizer=None, scaler=None, **scaler_options):
        self.dtype = dtype
        self.model = model or network()
        self.optimizer = optimizer or torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if dtype is FP16 and scaler is None:
            scaler = fastamp.GradScaler("cpu", init_scale=16.0, **scaler_options)
        self.scaler = scaler
        self.x, self.y = torch.randn(4, 8), torch.arange(4)

    def forward(self):
        with torch.autocast("cpu", dtype=self.dtype):
            return nn.functional.cross_entropy(self.model(self.x), self.y)

    def backward(self, loss):
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip(self):
        pass

    def end(self):
        pass

    def __call__(self):
        self.optimizer.zero_grad()
        self.backward(self.forward().float())
        self.clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.end()

    def check(self, **options):
        return fastamp.debug.check(self.model, self.optimizer, self.scaler, step=self, **options)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_right_program_has_no_findings(dtype):
    report = Loop(dtype).check()
    assert not report, str(report)
    assert str(report) == "0 findings"
    assert (report.ignored, report.unchecked) == ((), ())


def test_half_weights_under_torch_optim_are_found_and_fuse_cures_it():
    loop = Loop(model=network().bfloat16())
    report = fastamp.debug.check(loop.model, loop.optimizer)
    assert rules_of(report) == {"half-weights-torch-optim"}
    (finding,) = report.findings
    assert "6 of 6 parameters have 16 bits, such as 0.weight" in finding.what
    assert "fuse_" in finding.fix
    assert set(report.unchecked) == {r.name for r in RULES.values() if r.needs_step}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fastamp.optim.fuse_(loop.optimizer)
    assert not fastamp.debug.check(loop.model, loop.optimizer)


def test_optimizers_of_others_may_keep_masters():
    class Own(torch.optim.Optimizer):
        def step(self):
            pass

    model = network().bfloat16()
    assert not fastamp.debug.check(model, Own(model.parameters(), {}))


def test_fp16_without_a_scaler_is_found():
    loop = Loop(FP16)
    loop.scaler = None
    assert rules_of(loop.check()) == {"fp16-without-scaler"}
    loop.scaler = fastamp.GradScaler("cpu", enabled=False)
    assert rules_of(loop.check()) == {"fp16-without-scaler"}


def test_fp16_inference_needs_no_scaler():
    model, x = network(), torch.randn(2, 8)

    def infer():
        with torch.no_grad(), torch.autocast("cpu", dtype=FP16):
            model(x)

    assert not fastamp.debug.check(model, step=infer)


def test_a_scaler_with_bf16_alone_is_found():
    loop = Loop(BF16, scaler=fastamp.GradScaler("cpu", init_scale=16.0))
    assert rules_of(loop.check()) == {"scaler-without-fp16"}
    loop.scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert not loop.check()


def test_a_region_that_casts_nothing_is_found():
    loop = Loop(model=network().bfloat16())
    loop.x = loop.x.bfloat16()
    ignored = ("bf16-second-moments", "half-weights-torch-optim")
    report = loop.check(ignore=ignored)
    assert rules_of(report) == {"region-casts-nothing"}
    assert "bfloat16 already" in report.findings[0].what
    assert report.ignored == ignored


def test_a_region_for_another_device_is_found():
    loop = Loop()

    def forward():
        torch.set_autocast_enabled("cuda", True)  # as the region does on a machine with a GPU
        try:
            return nn.functional.cross_entropy(loop.model(loop.x), loop.y)
        finally:
            torch.set_autocast_enabled("cuda", False)

    loop.forward = forward
    found = {finding.rule: finding for finding in loop.check().findings}
    assert "no op inside runs on its device" in found["region-casts-nothing"].what


def test_backward_inside_the_region_is_found():
    loop = Loop()

    def backward(loss):
        with torch.autocast("cpu", dtype=BF16):
            loss.backward()

    loop.backward = backward
    assert rules_of(loop.check()) == {"backward-in-region"}


CLIPS = {
    "norm": lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1),
    "norm, one by one": lambda loop: nn.utils.clip_grad_norm_(
        loop.model.parameters(), 0.1, foreach=False
    ),
    "value": lambda loop: nn.utils.clip_grad_value_(loop.model.parameters(), 0.1),
    "fastamp": lambda loop: fastamp.clip_grad_norm_(loop.model.parameters(), 0.1),
}


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("make", [fastamp.GradScaler, torch.amp.GradScaler])
def test_clipping_before_unscale_is_found_and_after_it_is_not(kind, make):
    loop = Loop(FP16, scaler=make("cpu", init_scale=16.0))
    loop.clip = lambda: CLIPS[kind](loop)
    assert rules_of(loop.check()) == {"clip-before-unscale"}

    def clip():
        loop.scaler.unscale_(loop.optimizer)
        CLIPS[kind](loop)

    loop.clip = clip
    assert not loop.check()


def test_the_scalers_own_clip_and_divided_gradients_are_right():
    loop = Loop(FP16)

    def clip():
        for parameter in loop.model.parameters():
            parameter.grad.mul_(0.5)  # the mean of two micro-batches
        loop.scaler.clip_grad_norm_(loop.optimizer, 0.1)

    loop.clip = clip
    assert not loop.check()


class Past(Loop):
    """Steps the optimizer by itself, after what `prepare` does."""

    def __init__(self, prepare=id):
        model = network()
        super().__init__(FP16, model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.prepare = prepare

    def gradients(self):
        return [parameter.grad for parameter in self.model.parameters()]

    def __call__(self):
        self.optimizer.zero_grad()
        self.backward(self.forward().float())
        self.prepare(self)
        self.optimizer.step()


def _divide(loop):
    for gradient in loop.gradients():
        gradient.div_(loop.scaler.get_scale())


def _divide_together(loop):
    torch._foreach_mul_(loop.gradients(), 1.0 / loop.scaler.get_scale())


def _replace(loop):
    for parameter in loop.model.parameters():
        parameter.grad = parameter.grad / loop.scaler.get_scale()


@pytest.mark.parametrize(
    ("prepare", "is_found"),
    [
        (id, True),
        (lambda loop: [gradient.mul_(0.5) for gradient in loop.gradients()], True),
        (lambda loop: loop.scaler.unscale_(loop.optimizer), "step-after-unscale"),
        (_divide, False),
        (_divide_together, False),
        (_replace, False),
    ],
)
def test_scaled_gradients_that_are_stepped_are_found(prepare, is_found):
    report = Past(prepare).check()
    if isinstance(is_found, str):
        assert rules_of(report) == {is_found}
        return
    assert rules_of(report) == ({"step-past-scaler"} if is_found else set())
    if is_found:
        assert report.findings[0].where == "SGD.step()"
        assert report.findings[0].what == "gradients times 16"


def test_a_scaled_loss_may_be_divided_before_backward():
    loop = Past()
    loop.backward = lambda loss: (loop.scaler.scale(loss) / 4 + 0.0).backward()
    assert rules_of(loop.check()) == {"step-past-scaler"}
    loop.backward = lambda loss: loss.backward()  # A loss that no scaler has seen.
    assert "step-past-scaler" not in rules_of(loop.check())


def test_an_optimizer_beside_the_scaler_is_no_step_past_it():
    loop = Loop(FP16)
    other = network()
    beside = torch.optim.SGD(other.parameters(), lr=0.1)

    def step():
        loop()
        other(torch.ones(2, 8)).sum().backward()
        beside.step()

    assert not fastamp.debug.check(loop.model, [loop.optimizer, beside], loop.scaler, step=step)


def test_a_schedule_that_moves_on_skipped_steps_is_found():
    loop = Loop(FP16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
    loop.end = lambda: scheduler.step()
    assert not loop.check()
    loop.scaler.update(2.0**40)
    assert rules_of(loop.check()) == {"scheduler-on-skipped-step"}
    loop.scaler.update(2.0**40)
    loop.end = lambda: loop.scaler.step_was_skipped or scheduler.step()
    assert not loop.check()


def test_an_eps_that_is_0_in_the_weights_dtype_is_found():
    model = network().half()
    loop = Loop(FP16, model=model, optimizer=torch.optim.Adam(model.parameters(), eps=1e-8))
    found = fastamp.debug.check(model, loop.optimizer, ignore=["half-weights-torch-optim"])
    assert rules_of(found) == {"eps-is-zero"}
    assert "eps=1e-08 is 0 in float16" in found.findings[0].what
    loop.optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    assert not fastamp.debug.check(model, loop.optimizer, ignore=["half-weights-torch-optim"])


class Normalized(nn.Module):
    """A linear layer, and a function of its 16-bit result."""

    def __init__(self, function, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.linear.weight.data *= scale
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


def of_function(function, dtype=FP16, scale=1.0):
    loop = Loop(dtype, model=Normalized(function, scale))
    return loop.check(ignore=["fp16-without-scaler"])


def test_an_eps_that_is_0_in_an_op_is_found():
    report = of_function(lambda y: y / (y.abs() + 1e-8))
    assert rules_of(report) == {"eps-is-zero"}
    assert "add.Tensor in Normalized" in report.findings[0].where
    assert not of_function(lambda y: y / (y.abs() + 1e-3))
    assert not of_function(lambda y: y / (y.abs().float() + 1e-8))
    assert not of_function(lambda y: y / (y.abs() + 1e-8), dtype=BF16)


def test_norms_written_by_hand_in_fp16_are_found():
    def rms(y):
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-3)

    report = of_function(rms, scale=2000.0)
    assert "norm-in-16-bits" in rules_of(report)
    assert "pow.Tensor_Scalar in Normalized" in {f.where for f in report.findings}
    assert "norm-in-16-bits" not in rules_of(of_function(rms))
    assert "norm-in-16-bits" not in rules_of(of_function(lambda y: rms(y.float()), scale=2000.0))


def test_a_variance_of_large_means_in_16_bits_is_found():
    def centered(y):
        return y / (y.var(-1, keepdim=True) + 0.1)

    assert rules_of(of_function(centered)) == {"norm-in-16-bits"}
    large = lambda y: centered(y * 0.01 + 100.0)  # noqa: E731
    assert rules_of(of_function(large, dtype=BF16)) == {"norm-in-16-bits"}
    assert not of_function(centered, dtype=BF16)


def test_running_statistics_in_16_bits_are_found():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert not fastamp.debug.check(model)
    assert rules_of(fastamp.debug.check(model.half())) == {"norm-in-16-bits"}


def test_a_softmax_of_large_logits_in_16_bits_is_found():
    def attention(y):
        return torch.softmax(y, -1)

    report = of_function(attention, scale=800.0)
    assert rules_of(report) == {"softmax-in-16-bits"}
    assert "_softmax in Normalized" in report.findings[0].where
    assert not of_function(attention)
    assert not of_function(lambda y: attention(y.float()), scale=800.0)
    masked = lambda y: attention(y.masked_fill(y > 0, float("-inf")))  # noqa: E731
    assert not of_function(masked)
    lowest = lambda y: attention(y.masked_fill(y > 0, torch.finfo(y.dtype).min))  # noqa: E731
    assert not of_function(lowest)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_long_sums_in_16_bits_are_found(dtype):
    def pooled(y):
        return y.repeat(1, 700).mean(-1, keepdim=True) + y

    assert rules_of(of_function(pooled, dtype=dtype)) == {"long-sum-in-16-bits"}
    short = lambda y: y.repeat(1, 500).mean(-1, keepdim=True) + y  # noqa: E731
    assert not of_function(short, dtype=dtype)
    wide = lambda y: y.repeat(1, 700).mean(-1, keepdim=True, dtype=torch.float32) + y  # noqa: E731
    assert not of_function(wide, dtype=dtype)


def test_bias_gradients_of_many_rows_are_no_long_sums():
    loop = Loop()
    loop.x, loop.y = torch.randn(5000, 8), torch.arange(5000) % 8
    assert not loop.check()


def test_masks_beyond_fp16_are_found():
    def added(y):
        return torch.softmax(y + (1.0 - y.gt(0).to(y.dtype)) * -1e9, -1)

    report = of_function(added)
    assert rules_of(report) == {"mask-beyond-fp16"}
    assert "-1e+09 in float16" in report.findings[0].what
    with pytest.raises(RuntimeError, match="without overflow"):
        of_function(lambda y: y.masked_fill(y > 0, -1e9))
    findings = []

    def refused(y):
        try:
            return y.masked_fill(y > 0, -1e9)
        except RuntimeError as error:
            findings.append(error)
            return y

    assert rules_of(of_function(refused)) == {"mask-beyond-fp16"}
    assert findings
    assert not of_function(lambda y: y.masked_fill(y > 0, -1e4))
    assert not of_function(added, dtype=BF16)
    assert not of_function(lambda y: y.float().masked_fill(y > 0, -1e9))


def test_large_products_of_odd_sizes_are_found():
    report = fastamp.debug.check(nn.Sequential(nn.Linear(768, 50257)))
    assert rules_of(report) == {"dims-not-multiple-of-8"}
    assert "out_features=50257" in report.findings[0].what
    assert not fastamp.debug.check(nn.Sequential(nn.Linear(768, 50304)))
    odd = fastamp.debug.check(nn.Conv2d(3, 4096, 5))
    assert [f.what for f in odd.findings] == ["in_channels * kernel=75"]
    assert not fastamp.debug.check(nn.Conv2d(3, 768, 16))  # the patches of a vision transformer
    assert not fastamp.debug.check(nn.Sequential(nn.Linear(768, 10), nn.Conv2d(3, 64, 7)))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_in_16_bits_is_found(scaled):
    loop = Loop(FP16 if scaled else BF16)
    region = torch.autocast("cpu", dtype=loop.dtype)

    def forward():
        with region:
            return loop.model(loop.x).square().mean()

    loop.forward = forward
    loop.backward = lambda _: Loop.backward(loop, forward())
    assert rules_of(loop.check()) == {"loss-in-16-bits"}
    loop.backward = lambda _: Loop.backward(loop, forward().float())
    assert not loop.check()


def test_second_moments_in_bf16_at_slow_beta2_are_found():
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        slow, fast = (
            fastamp.optim.AdamW(
                model.parameters(), state_dtype=BF16, state_rounding="nearest", betas=(0.9, beta2)
            )
            for beta2 in (0.999, 0.95)
        )
    assert rules_of(fastamp.debug.check(model, slow)) == {"bf16-second-moments"}
    assert not fastamp.debug.check(model, fast)
    assert not fastamp.debug.check(model, fastamp.optim.AdamW(model.parameters(), state_dtype=BF16))
    half = network().bfloat16()
    optimizer = torch.optim.Adam(half.parameters())
    half(torch.randn(2, 8).bfloat16()).sum().backward()
    optimizer.step()
    assert "bf16-second-moments" in rules_of(fastamp.debug.check(half, optimizer))


def test_each_rule_has_a_test_here():
    here = Path(__file__)
    text = "".join(
        path.read_text(encoding="utf-8") for path in (here, here.with_name("doctor_programs.py"))
    )
    assert [name for name in RULES if f'"{name}"' not in text] == []


@pytest.mark.parametrize("name", RULES)
def test_each_rule_says_why_and_what_to_do(name):
    assert len(RULES[name].reason) > 20
    assert len(RULES[name].fix) > 20
