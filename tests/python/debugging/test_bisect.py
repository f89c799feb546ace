# SPDX-License-Identifier: Apache-2.0
"""``fastamp.debug.bisect``: planted faults, each cured by the policy file that it writes."""

from __future__ import annotations

import contextlib
import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fastamp
from fastamp._debug.bisect.search import needed_of

FP16, BF16 = torch.float16, torch.bfloat16
WIDTH = 64


@torch.library.custom_op("fastamp_tests::centered_exp", mutates_args=())
def centered_exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x) in steps that overflow in fp16 long before their quotient does."""
    return (x + 12).exp() / torch.full_like(x, 12).exp()


@centered_exp.register_fake
def _(x):
    return torch.empty_like(x)


def _setup(ctx, inputs, output):  # noqa: ARG001 (torch gives it by name)
    ctx.save_for_backward(output)


centered_exp.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0], setup_context=_setup)


class RMSNorm(nn.Module):
    """Overflows in fp16 where x is above 256."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


class TinyEps(nn.Module):
    """eps is 0 in fp16; rows that are 0 become 0 * inf."""

    def forward(self, x):
        return x * torch.rsqrt(x.abs().amax(-1, keepdim=True) + 1e-8)


class Probabilities(nn.Module):
    """The small probabilities of large logits are 0 in fp16, and log(0) is -inf."""

    def forward(self, x):
        return torch.log(torch.softmax(x * 24, -1))


class TwoPassVariance(nn.Module):
    """E[x^2] - E[x]^2 of numbers far from 0: the difference of two rounded numbers."""

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / (variance.abs() + 0.1)


class LongSum(nn.Module):
    """A sum over 65 536 elements that is more than fp16 holds."""

    def forward(self, x):
        total = x.abs().add(2.0).repeat(1, 65536 // WIDTH).sum(-1, keepdim=True)
        return x * (total / 65536)


class CustomOp(nn.Module):
    """An op of a library that has no autocast kernel."""

    def forward(self, x):
        return centered_exp(x)


class Healthy(nn.Module):
    """Rounds, and does no harm."""

    def forward(self, x):
        return x * torch.sigmoid(x)


class Net(nn.Module):
    """The faulty module between healthy ones."""

    def __init__(self, faulty, bias=True):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.gate = Healthy()
        self.middle = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.fault = faulty
        self.last_gate = Healthy()
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x):
        return self.last(self.last_gate(self.fault(self.middle(self.gate(self.first(x))))))


class Step:
    def __init__(self, model, dtype=FP16, scale=1.0, gain=1.0):
        self.model, self.dtype, self.scale = model, dtype, scale
        self.x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(5)) * gain
        self.y = torch.arange(32) % 8
        self.runs = 0

    def __call__(self):
        self.runs += 1
        with torch.autocast("cpu", dtype=self.dtype):
            loss = nn.functional.cross_entropy(self.model(self.x).float(), self.y)
        (loss * self.scale).backward()


def planted(name):
    if name == "eps":
        step = Step(Net(TinyEps(), bias=False))
        step.x[3] = 0.0
        return step
    faults = {
        "pow": RMSNorm,
        "softmax": Probabilities,
        "variance": TwoPassVariance,
        "custom op": CustomOp,
        "sum": LongSum,
    }
    model = Net(faults[name]())
    if name == "variance":
        nn.init.constant_(model.middle.bias, 40.0)
    return Step(model, gain=GAINS.get(name, 1.0))


GAINS = {"pow": 3000.0, "variance": 16.0}
CURES = {
    "pow": {"pow.Tensor_Scalar"},
    "softmax": {"aten::_softmax"},
    "eps": {"aten::add.Tensor"},
    "variance": {"aten::mean.dim"},
    "custom op": {"fastamp_tests::centered_exp"},
    "sum": {"sum.dim_IntList"},
}


def gradients_of(step, enabled=True):
    """By torch alone: a step with or without autocast."""
    step.model.zero_grad()
    with torch.autocast("cpu", dtype=step.dtype, enabled=enabled):
        loss = nn.functional.cross_entropy(step.model(step.x).float(), step.y)
    (loss * step.scale).backward()
    made = torch.cat([p.grad.double().reshape(-1) for p in step.model.parameters()])
    step.model.zero_grad()
    return made.numpy()


def agreement_of(step):
    own, torchs = gradients_of(step), gradients_of(step, enabled=False)
    return 2 * np.dot(own, torchs) / (np.dot(own, own) + np.dot(torchs, torchs))


@pytest.mark.parametrize("name", CURES)
def test_a_planted_fault_is_found_and_its_policy_file_cures_it(name, tmp_path):
    step = planted(name)
    before = agreement_of(step)
    assert not before >= 0.999  # NaN, too
    table = fastamp.policies.table()
    report = fastamp.debug.bisect(step, step.model)
    assert fastamp.policies.table() == table
    assert report.is_complete
    assert report.runs == step.runs <= 12
    assert {each.op for each in report.ops} == CURES[name]
    assert {each.module for each in report.ops} == {"fault"}
    assert report.before == pytest.approx(np.nan_to_num(before), abs=1e-12)
    report.write(tmp_path / "policy.toml")
    with fastamp.policies.for_modules(step.model, tmp_path / "policy.toml"):
        after = agreement_of(step)
    assert after >= 0.999
    assert report.after == pytest.approx(after, abs=1e-9)
    for op in CURES[name]:
        if "::" in op:
            fastamp.policies.unregister_op(op)  # for_modules leaves it as "pass"


def test_of_several_modules_the_one_at_fault_is_found():
    model = nn.Sequential()
    torch.manual_seed(0)
    for index in range(6):
        model.add_module(f"linear{index}", nn.Linear(WIDTH, WIDTH))
        model.add_module(f"norm{index}", RMSNorm())
    nn.init.normal_(model.linear3.weight, std=100.0)
    step = Step(model)
    report = fastamp.debug.bisect(step, model)
    assert [(each.op, each.module) for each in report.ops] == [("pow.Tensor_Scalar", "norm3")]
    assert report.after >= 0.999 > report.before
    assert report.runs <= 12


def test_two_faults_need_two_ops():
    step = Step(Net(Probabilities()), gain=3000.0)
    step.model.gate = RMSNorm()
    report = fastamp.debug.bisect(step, step.model)
    assert {each.module for each in report.ops} == {"fault", "gate"}
    assert len(report.ops) == 2
    assert report.after >= 0.999
    policies = report.policies.modules
    with fastamp.policies.for_modules(step.model, policies):
        assert agreement_of(step) >= 0.999
    for left_out in policies:
        rest = {module: ops for module, ops in policies.items() if module != left_out}
        with fastamp.policies.for_modules(step.model, rest):
            assert not agreement_of(step) >= 0.999
    for op in {each.op for each in report.ops}:
        if "::" in op:
            fastamp.policies.unregister_op(op)


def test_a_fault_behind_another_that_leaves_only_nan_is_found():
    step = planted("softmax")
    step.model.gate = LongSum()
    step.x *= 0.3
    report = fastamp.debug.bisect(step, step.model)
    assert "sum.dim_IntList" in {each.op.removeprefix("aten::") for each in report.ops}
    assert "linear" not in {each.op for each in report.ops}
    assert report.after >= 0.999


def test_a_product_is_named_only_if_nothing_cheaper_suffices():
    model = Net(nn.Identity())
    nn.init.normal_(model.middle.weight, std=3e4)  # overflows in the product itself
    model.fault = nn.Tanh()
    step = Step(model)
    report = fastamp.debug.bisect(step, model)
    assert {each.op for each in report.ops} == {"linear"}
    assert report.after >= 0.999 > report.before


def test_a_healthy_step_needs_nothing():
    step = Step(Net(Healthy()), dtype=BF16)
    report = fastamp.debug.bisect(step, step.model)
    assert not report
    assert report.before == report.after == pytest.approx(agreement_of(step), abs=1e-12)
    assert 0.999 <= report.before < 1
    assert report.runs == 3
    assert not report.policies.ops
    assert not report.policies.modules
    assert "Nothing has to run in fp32" in str(report)


def test_an_op_outside_of_the_model_is_named_for_the_program():
    model = nn.Linear(WIDTH, 8)

    def step():
        with torch.autocast("cpu", dtype=FP16):
            (model(torch.ones(4, WIDTH)) * 100.0).pow(2).mean().log().backward()

    nn.init.constant_(model.weight, 0.1)
    report = fastamp.debug.bisect(step, model)
    assert [(each.op, each.module) for each in report.ops] == [("pow.Tensor_Scalar", None)]
    assert report.policies.ops == {"pow.Tensor_Scalar": "fp32"}


class Stateful(nn.Module):
    """Changes all that a forward pass may change."""

    def __init__(self, crash=False):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.fault = RMSNorm()
        self.crash = crash

    def forward(self, x):
        self.calls = self.calls + 1
        noise = random.random() + float(np.random.rand()) + torch.rand(())
        x = nn.functional.dropout(self.norm(self.linear(x)), 0.2) * 400.0 + noise
        with torch.no_grad():
            self.linear.bias.add_(0.01)
        if self.crash:
            raise KeyError("planted")
        return self.fault(x)


def state_of(model):
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "gradients": [p.grad for p in model.parameters()],
        "values": [p.grad.clone() for p in model.parameters()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "random": random.getstate(),
        "table": fastamp.policies.table(),
        "classes": [type(module) for module in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    }


def same(own, torchs):
    if isinstance(own, torch.Tensor):
        return torch.equal(own, torchs)
    if isinstance(own, list):
        return len(own) == len(torchs) and all(map(same, own, torchs))
    return own == torchs


@pytest.mark.parametrize("crash", [False, True])
def test_everything_is_as_it_was(crash):
    model = Stateful(crash)
    step = Step(model)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    before = state_of(model)
    if crash:
        with pytest.raises(KeyError, match="planted"):
            fastamp.debug.bisect(step, model)
    else:
        assert {each.op for each in fastamp.debug.bisect(step, model).ops} == {"pow.Tensor_Scalar"}
    after = state_of(model)
    for name, value in before.items():
        assert same(value, after[name]), name
    assert all(a is b for a, b in zip(before["gradients"], after["gradients"], strict=True))


def test_a_crash_under_policies_puts_everything_back():
    step = planted("pow")
    calls = 0

    def crashing():
        nonlocal calls
        calls += 1
        step()
        if calls == 5:
            raise KeyError("planted")

    table, classes = fastamp.policies.table(), [type(m) for m in step.model.modules()]
    with pytest.raises(KeyError, match="planted"):
        fastamp.debug.bisect(crashing, step.model)
    assert fastamp.policies.table() == table
    assert [type(m) for m in step.model.modules()] == classes
    assert all(p.grad is None for p in step.model.parameters())


def test_a_step_that_is_not_deterministic_is_refused_with_how_much():
    step = planted("pow")

    def changing():
        step.x = step.x.roll(1, 1)
        step()

    with pytest.raises(RuntimeError, match=r"two runs in fp32 that agree to -?0\.\d+ only"):
        fastamp.debug.bisect(changing, step.model)


def test_noise_below_what_is_asked_for_is_told():
    step = Step(Net(Healthy()), dtype=BF16)

    def noisy():
        step.runs += 1
        step()
        step.model.last.bias.grad += 1e-4 * step.runs

    report = fastamp.debug.bisect(noisy, step.model)
    assert 0.999 < report.noise < 1 - 1e-9


def test_what_runs_in_16_bits_without_autocast_is_told():
    step = planted("pow")
    last = step.model.last_gate
    step.model.last_gate.forward = lambda x: (x.half() * 0.5).float() * type(last).forward(last, x)
    report = fastamp.debug.bisect(step, step.model)
    assert report.low == ("aten::_to_copy", "aten::mul.Tensor")
    assert "without autocast, too, and so not compared: aten::_to_copy" in str(report)


def test_if_no_policy_helps_the_ops_that_are_left_are_named(monkeypatch):
    @contextlib.contextmanager
    def only_mul(ranked):
        yield [each for each in ranked if each.op == "aten::mul.Tensor"]

    monkeypatch.setattr(fastamp._debug.bisect, "_registered", only_mul)
    step = planted("pow")
    fastamp.policies.register_op("aten::mul.Tensor", "pass")
    try:
        with pytest.raises(RuntimeError, match=r"with all 1 ops .* no policy brings .*pow\.Tensor"):
            fastamp.debug.bisect(step, step.model)
    finally:
        fastamp.policies.unregister_op("aten::mul.Tensor")


def test_used_up_runs_leave_what_was_found():
    step = planted("pow")
    report = fastamp.debug.bisect(step, step.model, max_runs=5)
    assert not report.is_complete
    assert report.runs == step.runs == 5
    assert report.after >= 0.999
    assert "The runs were used up" in str(report)
    complete = fastamp.debug.bisect(step, step.model)
    assert {each.op for each in complete.ops} < {each.op for each in report.ops}
    assert complete.cost < report.cost


def test_the_report_is_data_too(tmp_path):
    step = planted("pow")
    report = fastamp.debug.bisect(step, step.model)
    text = report.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text() == text + "\n"
    data = json.loads(text)
    assert data["ops"][0]["op"] == "pow.Tensor_Scalar"
    assert data["ops"][0]["local_error"] == 1e6
    assert data["runs"] == report.runs
    assert "inf" in str(report)


def test_bad_arguments_are_refused():
    model = nn.Linear(4, 4)
    step = Step(model)
    for arguments, error, text in (
        ((None, model), TypeError, "expected step to be callable, got NoneType"),
        ((step, step), TypeError, "expected model to be a torch.nn.Module, got Step"),
        ((step, model, 1.0), ValueError, "expected agree above 0 and below 1, got 1.0"),
        ((step, model, "0.9"), TypeError, "expected agree to be a number, got str"),
        ((step, nn.ReLU()), ValueError, "expected model to have parameters with gradients"),
        ((step, nn.Linear(4, 4).bfloat16()), ValueError, "got weight of torch.bfloat16"),
    ):
        with pytest.raises(error, match=f"bisect: .*{text}"):
            fastamp.debug.bisect(*arguments)
    with pytest.raises(ValueError, match="expected max_runs of at least 5, got 4"):
        fastamp.debug.bisect(step, model, max_runs=4)
    assert step.runs == 0


def test_steps_without_usable_gradients_are_refused():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.weight.detach().clone()

    def trains():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    with pytest.raises(ValueError, match=r"got one that calls SGD\.step\(\)"):
        fastamp.debug.bisect(trains, model)
    assert torch.equal(model.weight, weight)
    with pytest.raises(ValueError, match="gradients in the model's parameters, got none"):
        fastamp.debug.bisect(lambda: model(torch.ones(2, 4)).sum(), model)
    with pytest.raises(RuntimeError, match="wrong without mixed precision"):
        fastamp.debug.bisect(lambda: (model(torch.ones(2, 4)).sum() / 0).backward(), model)
    with pytest.raises(RuntimeError, match="got zeros only"):
        fastamp.debug.bisect(lambda: (model(torch.ones(2, 4)).sum() * 0).backward(), model)


@given(st.integers(1, 60), st.data())
def test_the_search_finds_the_needed_ones_in_few_calls(count, data):
    needed = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=4))
    cheap = data.draw(st.integers(0, count))
    calls = set()

    def holds(items):
        calls.add(frozenset(items))
        return needed <= set(items)

    assert set(needed_of(range(count), holds, cheap)) == needed
    assert len(calls) <= len(needed) * (2 * math.ceil(math.log2(count + 1)) + 2)


@given(st.integers(1, 40), st.data())
def test_the_search_returns_no_item_that_can_be_left_out(count, data):
    """Several sets suffice: what is found is one of them, and irreducible."""
    sets = data.draw(
        st.lists(st.sets(st.integers(0, count - 1), min_size=1, max_size=5), min_size=1, max_size=4)
    )

    def holds(items):
        return any(each <= set(items) for each in sets)

    found = needed_of(range(count), holds, count)
    assert holds(found)
    assert not any(holds([i for i in found if i != out]) for out in found)
