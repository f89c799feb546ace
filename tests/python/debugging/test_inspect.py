# SPDX-License-Identifier: Apache-2.0
"""``fastamp.debug.inspect``: each section against what is known of the step."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fastamp

BF16, FP16 = torch.bfloat16, torch.float16


class Model(nn.Module):
    """Linear layers around an op that is in no list."""

    def __init__(self, function=torch.tanh):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 4)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


class Step:
    def __init__(self, dtype=FP16, model=None, scale=2.0**10, optimizer=None, region=True):
        self.dtype, self.region = dtype, region
        self.model = model or Model()
        self.optimizer = optimizer or torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = fastamp.GradScaler("cpu", init_scale=scale, enabled=dtype is FP16)
        self.x = torch.randn(6, 8, dtype=torch.float32 if region else dtype)

    def __call__(self):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.region):
            loss = nn.functional.cross_entropy(self.model(self.x), torch.arange(6) % 4)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def inspect(self, **options):
        return fastamp.debug.inspect(self, self.model, self.optimizer, self.scaler, **options)


def find(report, op, backward=False, module=None):
    (row,) = (
        row
        for row in report.ops
        if row.op == op and row.backward == backward and module in (None, row.module)
    )
    return row


def test_an_inspected_step_gives_the_same_bits():
    plain, inspected = Step(), Step()
    inspected.x = plain.x
    plain()
    inspected.inspect()
    for own, torchs in zip(inspected.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(own, torchs)
        assert torch.equal(own.grad, torchs.grad)
    assert inspected.scaler.state_dict() == plain.scaler.state_dict()


def test_ops_have_modules_dtypes_and_reasons():
    report = Step(model=Model(lambda x: torch.exp(x.tanh()))).inspect()
    first = find(report, "addmm", module="first")
    assert (first.autocast_op, first.reason, first.output) == ("linear", "lower", "float16")
    assert first.inputs == ("float16",) * 3
    assert first.flops == 2 * 6 * 8 * 16
    assert find(report, "tanh").reason == "inherited"
    assert find(report, "tanh").module == "Model"
    loss = find(report, "_log_softmax")
    assert (loss.reason, loss.output) == ("fp32", "float32")
    assert {row.module for row in report.ops if row.op == "mm" and row.backward} == {
        "first",
        "last",
    }
    assert find(report, "tanh_backward", backward=True).reason == "backward"
    assert find(report, "tanh_backward", backward=True).module == "Model"
    with fastamp.policies.override({"linear": "fp32"}):
        changed = Step().inspect()
    assert {row.reason for row in changed.ops if row.op == "addmm"} == {"override"}


def test_backward_passes_of_ops_between_modules_are_their_modules():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, holder):  # torch sees no tensors in such arguments
            return self.outer(self.inner(holder["x"].value).sigmoid())

    class Holder:
        def __init__(self, value):
            self.value = value

    class Blocks(Model):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block({"x": Holder(x.tanh())}) + x
            return self.last(self.first(x))

    report = Step(model=Blocks()).inspect()
    modules = {
        op: {row.module for row in report.ops if row.op == op and row.backward}
        for op in ("sigmoid_backward", "tanh_backward")
    }
    assert modules == {"sigmoid_backward": {"blocks.0", "blocks.1"}, "tanh_backward": {"Blocks"}}


HOOKS = ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("of_all", [False, True], ids=["own", "of all"])
def test_ops_in_hooks_of_modules_are_the_modules(kind, of_all):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))

    def hook(module, *args):
        if module is model[1]:
            last = args[-1]
            (last if isinstance(last, torch.Tensor) else last[0]).erfc()

    if of_all:
        handle = getattr(nn.modules.module, f"register_module_{kind}")(hook)
    else:
        handle = getattr(model[1], f"register_{kind}")(hook)
    with handle:
        report = fastamp.debug.inspect(lambda: model(torch.ones(2, 8)).sum().backward(), model)
    (row,) = (row for row in report.ops if row.op == "erfc")
    # torch runs hooks before all modules' forward passes before those of the module itself.
    module = "Sequential" if of_all and kind == "forward_pre_hook" else "1"
    assert (row.module, row.backward, row.calls) == (module, "backward" in kind, 1)


def test_ops_in_hooks_of_tensors_are_rows_without_a_module():
    """torch runs them before what a tool can see of their node."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))

    def hook(gradient):
        gradient.erfc()

    model[0].weight.register_hook(hook)

    def step():
        output = model(torch.ones(2, 8))
        output.register_hook(hook)
        output.sum().backward()

    report = fastamp.debug.inspect(step, model)
    (row,) = (row for row in report.ops if row.op == "erfc")
    assert (row.module, row.backward, row.calls) == ("", True, 2)


def test_weights_in_16_bits_are_a_reason():
    step = Step(BF16, model=Model().bfloat16(), region=False)
    report = step.inspect()
    low = [row for row in report.ops if "bfloat16" in row.inputs and not row.backward]
    assert {row.reason for row in low} == {"16-bit weights"}
    assert {row.module for row in low} == {"first", "last", "Model", "", "SGD.step"}


def test_checkpointed_modules_are_named_in_their_recomputation():
    class Checkpointed(Model):
        def forward(self, x):
            def part(x):
                return torch.tanh(self.first(x))

            return self.last(torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False))

    report = Step(model=Checkpointed()).inspect()
    again = [row for row in report.ops if row.op == "addmm" and row.backward]
    assert [row.module for row in again] == ["first"]


def test_ranges_are_numpys():
    found = {}

    def function(y):
        found["y"] = y.detach().clone()
        return (y * 3000.0).tanh()

    report = Step(model=Model(function)).inspect()
    made = (found["y"] * 3000.0).double().numpy()
    row = find(report, "mul.Tensor", module="Model")
    finite = np.abs(made[np.isfinite(made) & (made != 0)])
    assert row.greatest == finite.max()
    assert row.least == finite.min()
    assert row.non_finite == np.sum(~np.isfinite(made))
    exponents, counts = np.unique(np.frexp(finite)[1] - 1, return_counts=True)
    assert row.exponents == dict(zip(exponents.tolist(), counts.tolist(), strict=True))


def test_local_errors_are_those_of_one_op_and_errors_those_of_all():
    step = Step()
    report = step.inspect()
    with torch.no_grad():
        model = Model()
        x = step.x
        low = torch.addmm(model.first.bias.half(), x.half(), model.first.weight.half().t()).double()
        same = torch.addmm(
            model.first.bias.half().float(), x.half().float(), model.first.weight.half().float().t()
        ).double()
        wide = torch.addmm(model.first.bias, x, model.first.weight.t()).double()
    row = find(report, "addmm", module="first")
    assert row.local_error == pytest.approx(((low - same).norm() / same.norm()).item(), rel=1e-3)
    unit = np.abs(np.spacing(same.detach().numpy().astype(np.float32))) * 2**13  # of 23 bits, 10
    distance = (low.double() - same.double()).abs().detach().numpy()
    assert row.local_ulps == pytest.approx((distance / unit).max(), rel=1e-2)
    cosine = torch.nn.functional.cosine_similarity(
        low.double().flatten(), same.double().flatten(), 0
    )
    assert row.local_cosine == pytest.approx(cosine.item(), abs=1e-9)
    assert row.error == pytest.approx(((low - wide).norm() / wide.norm()).item(), rel=1e-3)
    assert row.local_error < row.error
    without = Step().inspect(twin=False)
    assert {(row.local_error, row.error) for row in without.ops} == {(None, None)}


def test_gradients_agree_with_a_step_in_fp32():
    step = Step()
    report = step.inspect()
    reference = Step(region=False)
    reference.model = Model()
    loss = nn.functional.cross_entropy(reference.model(step.x), torch.arange(6) % 4)
    (loss * 2.0**10).backward()
    inspected = Step()
    inspected.x = step.x
    inspected.scaler.step = lambda _: None  # keeps the gradients scaled
    inspected.scaler.update = lambda: None
    inspected()
    for row in report.gradients:
        own = inspected.model.get_parameter(row.name).grad.double()
        torchs = reference.model.get_parameter(row.name).grad.double()
        expected = ((own - torchs).norm() / torchs.norm()).item()
        assert row.error == pytest.approx(expected, rel=1e-2), row.name


def test_an_overflow_shows_where_it_begins():
    report = Step(model=Model(lambda y: (y * 500).pow(2).sqrt())).inspect()
    broken = [row for row in report.ops if row.non_finite]
    assert broken[0].op == "pow.Tensor_Scalar"
    assert broken[0].local_error == math.inf
    assert report.skipped
    assert report.weights == ()
    assert "The step was skipped" in report.summary()
    assert "norm-in-16-bits" in {finding.rule for finding in report.check.findings}


def test_the_loss_scale_is_where_gradients_neither_underflow_nor_overflow():
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))

    def inspected(scale):
        step = Step(scale=scale)
        step.x = x
        return step.inspect()

    found = inspected(1.0).loss_scale
    assert (found.scale, found.largest_scale) == (1.0, 2.0**found.headroom)
    assert not inspected(found.largest_scale).skipped
    assert inspected(2 * found.largest_scale).skipped
    shares = [share for _, share in sorted(found.underflows.items())]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.01 > shares[-1]
    # At another scale the numbers are the same.
    other = inspected(2.0**-4).loss_scale
    assert (other.largest_scale, other.smallest_scale) == (
        found.largest_scale,
        found.smallest_scale,
    )
    assert found.smallest_scale < found.largest_scale
    assert Step(BF16).inspect().loss_scale is None


def test_what_underflowed_counts_though_it_is_gone():
    report = Step(scale=2.0**-18).inspect()
    assert report.loss_scale.underflows[2.0**-18] > 0.1
    assert report.loss_scale.smallest_scale > 2.0**-18
    lost = [row.lost for row in report.gradients if row.name.endswith("weight")]
    assert max(lost) > 0.1
    assert max(row.zeros for row in report.gradients) > 0.1


def test_weights_that_stall_are_counted():
    torch.manual_seed(0)
    model = Model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    step = Step(BF16, model=model, optimizer=optimizer, region=False)
    report = step.inspect()
    assert [row.name for row in report.weights] == [n for n, _ in model.named_parameters()]
    assert min(row.stalled for row in report.weights) > 0.5
    assert "weights keep more than half of their elements" in report.summary()
    moved = Step(BF16).inspect()
    assert max(row.stalled for row in moved.weights) < 0.1
    for row in moved.weights:
        assert 0 < row.update < 1


def test_a_model_without_parameters_and_a_step_without_an_optimizer():
    model = nn.Sequential(nn.ReLU())
    report = fastamp.debug.inspect(lambda: model(torch.ones(3)), model)
    assert (report.gradients, report.weights, report.loss_scale) == ((), (), None)
    assert "no products" in str(report)
    assert report.to_html()


def test_a_step_may_write_its_tensors_and_use_dropout():
    def function(y):
        y = y.clone()
        y.mul_(2.0)
        y[0].add_(1.0)
        return nn.functional.dropout(y, 0.5)

    torch.manual_seed(3)
    plain = Step(model=Model(function))
    torch.manual_seed(7)
    plain()
    inspected = Step(model=Model(function))
    inspected.x = plain.x
    torch.manual_seed(7)
    report = inspected.inspect()
    for own, torchs in zip(inspected.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(own, torchs)
    assert find(report, "mul_.Tensor").local_error < 1e-3


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):  # noqa: ARG002
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_pages_are_whole_and_load_nothing(tmp_path):
    report = Step(model=Model(lambda y: (y * 500).pow(2).sqrt())).inspect()
    report.to_html(tmp_path / "step.html")
    page = Page()
    page.feed((tmp_path / "step.html").read_text())
    assert page.open == []
    assert {"svg", "table", "polyline", "rect"} <= page.tags
    assert "pow.Tensor_Scalar Model: inf" in (tmp_path / "step.html").read_text()
    assert page.links == []


def test_tables_and_data_have_all_sections(tmp_path):
    report = Step().inspect()
    text = str(report)
    for title in ("Ops:", "Errors:", "Ranges:", "Loss scale:", "Gradients", "Weights:", "Findings"):
        assert f"\n{title}" in text
    record = json.loads(report.to_json(tmp_path / "step.json"))
    assert record == json.loads((tmp_path / "step.json").read_text())
    assert len(record["ops"]) == len(report.ops)
    assert record["gradients"][0]["name"] == "first.weight"
    report.write(tmp_path / "step.txt")
    assert (tmp_path / "step.txt").read_text() == text + "\n"


@pytest.mark.parametrize(
    ("dtype", "ends"), [(FP16, "float16 ends at 65504"), (BF16, "bfloat16 ends at 3.4e+38")]
)
def test_tables_tell_the_ends_of_the_dtypes_that_were_used(dtype, ends):
    text = Step(dtype=dtype).inspect().text()
    assert text.count(" ends at ") == 1
    assert f"\n{ends}, " in text


def test_the_terminal_shows_tables(capsys):
    Step().inspect().print(rows=3)
    shown = capsys.readouterr().out
    assert "Loss scale" in shown
    assert "more rows" in shown


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((3, nn.ReLU()), {}, "expected step to be callable, got int"),
        ((print, 3), {}, "expected model to be a torch.nn.Module, got int"),
        ((print, nn.ReLU(), 3), {}, "expected optimizer to be a torch.optim.Optimizer"),
        ((print, nn.ReLU()), {"ignore": "x"}, "expected ignore to be names of rules"),
    ],
)
def test_bad_arguments_are_refused(arguments, options, text):
    with pytest.raises(TypeError, match=f"inspect: {text}"):
        fastamp.debug.inspect(*arguments, **options)


@pytest.mark.filterwarnings("ignore:.*nested.tensor:UserWarning")
@pytest.mark.filterwarnings("error::RuntimeWarning")  # that a tool has failed
def test_fake_tensors_in_a_step_are_left_out(recwarn):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        with FakeTensorMode():
            torch.nn.functional.linear(torch.empty(2, 8), torch.empty(8, 8))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(2, 8)).float().sum()
        loss.backward()
        optimizer.step()

    report = fastamp.debug.inspect(step, model, optimizer)
    assert any(row.backward for row in report.ops)
    assert not [str(each.message) for each in recwarn if "fastamp" in str(each.message)]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_step_with_nested_tensors_is_told(layout: torch.layout):
    trained = []
    for inspects in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model=model, optimizer=optimizer):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                parts = [model(torch.ones(rows, 8)) for rows in (2, 4)]
                nested = (torch.nested.as_nested_tensor(parts, layout=layout) * 2).relu()
                loss = sum(part.float().square().sum() for part in nested.unbind())
            loss.backward()
            optimizer.step()

        if inspects:
            report = fastamp.debug.inspect(step, model, optimizer)
            assert any(row.backward for row in report.ops)
            assert len(report.weights) == 2
        else:
            step()
        trained.append(model.weight.detach())
    assert torch.equal(*trained)
