# SPDX-License-Identifier: Apache-2.0
"""The line that says why a step was skipped, and the step that is found by it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fastamp
from debugging.doctor_programs import SICK, program
from fastamp._debug.check.order_rules import _has_nonzero
from fastamp._debug.watch.origins import has_nonfinite
from support.children import run_program

OVERFLOWING = SICK["an attention whose scores overflow"].text()
# Nothing happens but at step 2, whose batch has NaN.
LATE = program(
    before=(
        "batches = [torch.randn(4, 8).numpy() for _ in range(3)]\nbatches[2][0, 0] = float('nan')"
    ),
    batch="torch.from_numpy(batches[step]), torch.arange(4)",
    after="print('step', step)",
)
CALM = program(after="print('step', step)")


def run(tmp_path, text, *options):
    (tmp_path / "train.py").write_text(text)
    return run_program("-m", "fastamp", *options, "train.py", cwd=tmp_path)


def inspected(scale, function, x, dtype=torch.float16):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=scale)

    def step():
        with torch.autocast("cpu", dtype=dtype):
            loss = function(model(x))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return fastamp.debug.inspect(step, model, optimizer, scaler), scaler, step


def test_the_first_skipped_step_is_found_and_named(tmp_path):
    done = run(tmp_path, LATE, "--inspect", "step.json", "--at-first-skip")
    assert done.stdout == "step 0\nstep 1\nstep 2\n"
    record = json.loads((tmp_path / "step.json").read_text())
    assert record["title"]["step"] == 2
    assert record["title"]["program"] == "train.py"
    cause = record["check"]["cause"]
    assert cause["text"].startswith("step 2 was skipped: ")
    assert "your data, a float32 tensor [4, 8]" in cause["text"]
    line = next(i for i, text in enumerate(LATE.splitlines(), 1) if "model(x)" in text)
    assert cause["source"] == f"train.py:{line}"


def test_a_run_without_such_a_step_says_so(tmp_path):
    done = run(tmp_path, CALM, "--inspect", "step.json", "--at-first-nonfinite")
    assert "no step had inf or NaN in its gradients: the program ended after 3 steps" in done.stderr
    assert not (tmp_path / "step.json").exists()
    assert done.returncode == 0


def test_the_three_tools_say_the_same(tmp_path):
    printed = OVERFLOWING + "    print(scaler.overflow_report(model))\n    break\n"
    checked = run(tmp_path, OVERFLOWING, "check").stdout
    (line,) = (row for row in checked.splitlines() if row.startswith("cause: "))
    line = line.removeprefix("cause: ")
    assert "bmm (in 1, train.py:" in line
    assert "no smaller loss scale helps" in line
    done = run(tmp_path, printed, "--inspect", "step.txt", "--at-first-skip")
    assert f"Cause: {line}" in (tmp_path / "step.txt").read_text()
    assert f"Cause: {line}" in done.stdout


def test_the_overflow_report_has_the_cause_where_a_tool_looked():
    report, scaler, step = inspected(
        16.0, lambda y: (y * 1e4).pow(2).float().mean(), torch.ones(4, 8)
    )
    assert report.check.cause is not None
    assert scaler.overflow_report().cause == report.check.cause.text
    assert f"Cause: {report.check.cause}" in str(scaler.overflow_report())
    step()  # Nobody looks at this one.
    assert scaler.overflow_report().step == 1
    assert scaler.overflow_report().cause == ""
    assert "cause" not in scaler.overflow_report().as_dict()


def test_a_gradient_that_a_smaller_scale_saves_is_no_fault():
    report, _, _ = inspected(2.0**24, lambda y: y.float().square().mean(), torch.ones(4, 8))
    cause = report.check.cause
    assert cause is not None
    assert cause.backward
    assert "a smaller loss scale helps" in cause.text
    assert cause.rule == ""
    assert not report.check
    # And it does: up to the scale that the line names another op is the first, or none.
    largest = float(cause.text.partition("finite up to ")[2].partition(",")[0])
    for scale, is_same in ((largest, False), (4 * largest, True)):
        other, _, _ = inspected(scale, lambda y: y.float().square().mean(), torch.ones(4, 8))
        found = other.check.cause
        assert (found is not None and found.op == cause.op) == is_same, scale


@pytest.mark.parametrize("ignore", [(), ("scaled-gradient-penalty",)])
def test_what_a_penalty_of_scaled_gradients_overflows_is_the_penaltys_fault(ignore):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0**12)
    x = torch.randn(4, 8)

    def step(with_penalty=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), torch.arange(4))
        if with_penalty:
            gradients = torch.autograd.grad(
                scaler.scale(loss), list(model.parameters()), create_graph=True
            )
            loss = loss + sum(g.square().sum() for g in gradients)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def two_steps():
        step()
        scaler.update(2.0**24)
        step(with_penalty=False)  # What overflows here does so by the scale alone.

    for steps in (step, two_steps):
        report = fastamp.debug.check(model, optimizer, scaler, step=steps, ignore=ignore)
        assert report.cause is not None
        assert report.cause.backward
        assert report.cause.rule == "scaled-gradient-penalty"
        assert "made of gradients that carry the scale" in report.cause.text
        found = {finding.where: finding.count for finding in report.findings}
        assert found.keys() == (set() if ignore else {"the loss", report.cause.op}), str(report)
        assert found.get(report.cause.op, 1) == 1
    # The gradients of the penalty themselves overflow: a smaller scale helps those.
    scaler.update(2.0**24)
    report = fastamp.debug.check(model, optimizer, scaler, step=step, ignore=ignore)
    assert report.cause is not None
    assert report.cause.backward
    assert report.cause.rule == ""
    assert "a smaller loss scale helps" in report.cause.text


@pytest.mark.parametrize("order", ["loss, penalty", "penalty, loss"])
def test_what_another_backward_pass_overflows_is_not_the_penaltys_fault(order: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0**24)
    x = torch.randn(4, 8)

    def backward_of(part):
        if part == "loss":
            with torch.autocast("cpu", dtype=torch.float16):
                scaler.scale(nn.functional.cross_entropy(model(x), torch.arange(4))).backward()
            return
        output = model(x)  # In float32, so nothing of it overflows.
        scaled = scaler.scale(output.square().mean())
        gradients = torch.autograd.grad(scaled, list(model.parameters()), create_graph=True)
        scaler.scale(sum(1e-9 * g.square().mean() for g in gradients)).backward()

    def step():
        optimizer.zero_grad()
        for part in order.split(", "):
            backward_of(part)
        scaler.step(optimizer)
        scaler.update()

    report = fastamp.debug.check(model, optimizer, scaler, step=step)
    assert "scaled-gradient-penalty" in {finding.rule for finding in report.findings}
    assert report.cause is not None
    assert report.cause.rule == ""
    assert "a smaller loss scale helps" in report.cause.text


def test_a_buffer_that_has_nan_is_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8).eval())
    model[1].running_mean[0] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()

    report = fastamp.debug.check(model, optimizer, step=step)
    assert report.cause is not None
    assert "was given NaN by the buffer 1.running_mean" in report.cause.text
    assert {f.rule for f in report.findings} == {
        "nonfinite-input",
        "step-without-scaler",
        "norm-statistics-not-finite",
    }


class Sharded(torch.Tensor):
    """As a DTensor: reading it whole would talk to other ranks."""

    @staticmethod
    def __new__(cls, local):
        made = torch.Tensor._make_wrapper_subclass(cls, local.shape, dtype=local.dtype)
        made._local_tensor = local
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a tensor with shards elsewhere")


def test_of_a_sharded_tensor_only_the_own_shard_is_read():
    assert has_nonfinite(Sharded(torch.tensor([1.0, float("inf")])))
    assert not has_nonfinite(Sharded(torch.ones(2)))
    assert _has_nonzero(Sharded(torch.ones(2)))
    assert not _has_nonzero(Sharded(torch.zeros(2)))


@pytest.mark.parametrize("option", ["--at-first-skip", "--at-first-nonfinite"])
def test_a_step_to_find_needs_a_place_to_write(option, capsys, monkeypatch):
    from fastamp import _cli

    monkeypatch.setattr("sys.argv", ["fastamp", option, "train.py"])
    with pytest.raises(SystemExit) as ended:
        _cli.main()
    assert ended.value.code == 2
    text = f"python -m fastamp: expected --inspect FILE with {option}, got none\n"
    assert capsys.readouterr().err.endswith(text)
