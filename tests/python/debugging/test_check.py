# SPDX-License-Identifier: Apache-2.0
"""``fastamp.debug.check``: arguments, reports, what it leaves behind."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fastamp
from support.autocast_state import torch_state


def model_and_step(fail=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(2, 8)).float().square().mean()
        loss.backward()
        if fail:
            raise OverflowError("in the step")
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def test_a_checked_step_gives_the_same_bits():
    plain, _, step = model_and_step()
    step()
    checked, optimizer, checked_step = model_and_step()
    assert not fastamp.debug.check(checked, optimizer, step=checked_step)
    for own, torchs in zip(checked.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, torchs)


@pytest.mark.parametrize(
    "run", [fastamp.debug.check, lambda m, o, step: fastamp.debug.inspect(step, m, o)]
)
def test_what_a_step_raises_comes_through_and_nothing_stays(run):
    model, optimizer, step = model_and_step(fail=True)
    backward, schedule = torch.autograd.backward, torch.optim.lr_scheduler.LRScheduler.step
    state = torch_state()
    with pytest.raises(OverflowError, match="in the step"):
        run(model, optimizer, step=step)
    assert torch.autograd.backward is backward
    assert torch.optim.lr_scheduler.LRScheduler.step is schedule
    assert torch_state() == state
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert fastamp._C.current_op_call() is None


def test_reports_are_data():
    model = nn.Linear(4, 4).half()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
    report = fastamp.debug.check(model, optimizer)
    record = json.loads(report.to_json())
    assert [f["rule"] for f in record["findings"]] == ["half-weights-torch-optim", "eps-is-zero"]
    assert all(f["reason"] and f["fix"] for f in record["findings"])
    text = str(report)
    assert text.endswith("2 findings of 2 rules; 28 rules need a step: check(..., step=...)")
    for part in ("why: torch.optim adds", "fix: fastamp.optim.fuse_", "at torch.optim.adam.Adam"):
        assert part in text


def test_a_report_is_written(tmp_path):
    fastamp.debug.check(nn.Linear(2, 2)).to_json(tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text())["findings"] == []


def test_a_model_without_parameters_is_checked():
    model = nn.Sequential(nn.ReLU())
    assert not fastamp.debug.check(model, step=lambda: model(torch.ones(2)))


def test_a_model_without_sizes_yet_is_checked():
    model = nn.Sequential(nn.LazyLinear(1001))
    assert not fastamp.debug.check(model)
    found = fastamp.debug.check(model, step=lambda: model(torch.ones(2, 1000))).findings
    assert [f.what for f in found] == ["out_features=1001"]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((3,), {}, TypeError, "expected model to be a torch.nn.Module, got int"),
        ((nn.ReLU(), 3), {}, TypeError, "expected optimizer to be a torch.optim.Optimizer"),
        ((nn.ReLU(), None, 3), {}, TypeError, "expected scaler to be a GradScaler or None"),
        ((nn.ReLU(),), {"step": 3}, TypeError, "expected step to be callable, got int"),
        ((nn.ReLU(),), {"ignore": "eps-is-zero"}, TypeError, "expected ignore to be names"),
        (
            (nn.ReLU(),),
            {"ignore": ["eps-zero"]},
            ValueError,
            "got 'eps-zero'; nearest names: eps-is-zero",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, options, error, text):
    with pytest.raises(error, match=f"check: .*{text}"):
        fastamp.debug.check(*arguments, **options)


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, fastamp.GradScaler, None])
def test_a_scaler_of_the_step_is_found(cls):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = cls("cpu") if cls else None

    def step():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(2, 8)).float().square().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()

    found = [f.rule for f in fastamp.debug.check(model, optimizer, step=step).findings]
    assert found == ["clip-before-unscale" if scaler else "fp16-without-scaler"]


def test_several_optimizers_are_checked():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()
    model = nn.ModuleList([first, second])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in model]
    assert [f.rule for f in fastamp.debug.check(model, optimizers).findings] == [
        "half-weights-torch-optim"
    ]


def test_compiled_models_run_eagerly_meanwhile():
    model, optimizer, _ = model_and_step()
    compiled = torch.compile(model, backend="eager")

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compiled(torch.ones(2, 8))
        loss.square().mean().backward()

    assert {f.rule for f in fastamp.debug.check(model, optimizer, step=step).findings} == {
        "loss-in-16-bits"
    }
