# SPDX-License-Identifier: Apache-2.0
"""Rows of fp8 compare what they say, run where it is there, and are left out where it is not."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import fastamp
from benchmarks import run
from benchmarks.budget import Effort
from benchmarks.harness import BASELINE, FASTAMP, Result, judge, measure, prepared
from benchmarks.models import wide_digits
from benchmarks.rows import all_rows, float8, float8_peers
from benchmarks.rows.float8 import BASE_DTYPE, BF16_PRODUCTS, FLOAT8_PRODUCTS

pytestmark = pytest.mark.filterwarnings("ignore:.*fp8 on the CPU is a reference")
ONCE = Effort(2, 1e-9, 0, 2, 0, 2)


def test_the_host_row_leaves_the_products_out():
    row = float8.host_row("cpu")
    found = measure(row, ONCE)
    assert set(found.samples) == {BASELINE, FASTAMP, BF16_PRODUCTS, FLOAT8_PRODUCTS}
    times = {BASELINE: 30e3, BF16_PRODUCTS: 10e3, FASTAMP: 65e3, FLOAT8_PRODUCTS: 40e3}
    result = Result("r", 1, {name: [time] * 3 for name, time in times.items()})
    judge(result, row.goal)
    assert result.goal_reached  # 25 us around the products beside 20
    result.samples[FASTAMP] = [65.1e3] * 3
    judge(result, row.goal)
    assert not result.goal_reached


def test_the_host_row_runs_in_fp8_and_torchs_side_does_not():
    candidates = float8.host_row("cpu").candidates()
    for which, outcome in ((BASELINE, set()), (FASTAMP, {"float8"})):
        with prepared(candidates[which]), fastamp.debug.trace() as trace:
            exec(candidates[which].statement, dict(candidates[which].names))
        assert {row.float8 for row in trace.rows} - {""} == outcome
    for which in (BF16_PRODUCTS, FLOAT8_PRODUCTS):
        exec(candidates[which].statement, dict(candidates[which].names))


@pytest.mark.parametrize("rule", [True, False])
def test_a_row_of_a_shape_times_forward_and_backward_with_casts(rule):
    row = float8.linear_row("cpu", 8, 32, 48, rule=rule)
    found = measure(row, ONCE)
    assert set(found.samples) == {BASELINE, FASTAMP}
    assert found.facts == {FASTAMP: {"layers in fp8": 1.0}}
    assert ("without the rule" in row.name) == (not rule)
    with fastamp.debug.trace() as trace:
        row.candidates()[FASTAMP].names["step"]()
    assert trace.totals["weight_casts"] == 1


def test_the_row_of_weight_copies_casts_no_weight_where_they_are_written():
    row = float8.copies_row("cpu", 32, 48)
    found = measure(row, ONCE)
    assert set(found.samples) == {BASELINE, float8.COPIES, float8.CASTS}
    candidates = row.candidates()
    for which, casts in ((float8.COPIES, 0), (float8.CASTS, 1)):
        with prepared(candidates[which]), fastamp.debug.trace() as trace:
            candidates[which].names["step"]()
        assert trace.totals["weight_casts"] == casts


def test_a_shape_that_stays_in_the_base_dtype_says_so():
    assert measure(float8.linear_row("cpu", 8, 32, 40), ONCE).facts == {
        FASTAMP: {"layers in fp8": 0}
    }


@pytest.mark.parametrize(
    ("what", "shape"), [("activation", (64, 32, 16)), ("weight", (16, 32, 64))]
)
def test_rows_of_casts_count_the_bytes_of_the_wide_operand(what, shape):
    row = float8.cast_row("cpu", what, *shape)
    assert row.bytes_moved == 64 * 32 * (8 if what == "activation" else 12)
    assert set(measure(row, ONCE).samples) == {BASELINE, FASTAMP}


@pytest.mark.parametrize("step", ["step()", "grads()"])
def test_a_row_of_a_model_trains_it_three_ways(step):
    work = replace(wide_digits(8, 32, 2), steps=3)
    found = measure(float8.training_row(work, "cpu", None, step), ONCE)
    assert set(found.samples) == set(found.facts) == {BASELINE, FASTAMP, BASE_DTYPE}
    saved = {name: facts["MiB saved for backward"] for name, facts in found.facts.items()}
    assert saved[FASTAMP] < saved[BASE_DTYPE] <= saved[BASELINE]
    loss = {name: facts["loss"] for name, facts in found.facts.items()}
    assert loss[BASE_DTYPE] == loss[BASELINE] != loss[FASTAMP]
    assert loss[FASTAMP] == pytest.approx(loss[BASELINE], rel=0.05)


def test_gpus_without_fp8_have_no_rows_of_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an A100")
    findings = run.Findings()
    for row in all_rows(["cuda"]):
        if row.group == float8.GROUP:
            row = replace(row, device="cpu")  # empties no cache of a GPU
            run._measure_row(row, ONCE, findings)
    assert findings.results == []
    assert findings.failed == 0
    assert len(findings.notes) > 30
    assert all(note.endswith("not measured: an A100 has no fp8") for note in findings.notes)


def test_every_shape_and_number_of_tokens_has_a_row():
    names = {row.name for row in all_rows(["cuda"]) if row.group == float8.GROUP}
    for inputs, outputs in float8.SHAPES:
        for tokens in float8.TOKENS:
            assert f"cuda: fp8: linear {inputs} to {outputs}, {tokens} tokens" in names
    for model in ("digits MLP, batch 1797", "ViT-B/16", "GPT-2 124M", "Llama 8B block"):
        assert any(name.startswith(f"cuda: fp8: {model}") for name in names)


def test_libraries_that_are_missing_or_fail_leave_the_others(monkeypatch, capsys):
    def missing(*_):
        raise ImportError

    def fails(*_):
        raise RuntimeError("no such kernel")

    made = []
    libraries = {"A": missing, "B": fails, "C": lambda *_: lambda: made.append(1)}
    monkeypatch.setattr(float8_peers, "LIBRARIES", libraries)
    x = torch.ones(1)
    assert float8_peers.peers("cpu", x, x, x) == {}
    assert list(float8_peers.peers("cuda", x, x, x)) == ["C"]
    assert made == [1]
    assert capsys.readouterr().err == "B: not measured: RuntimeError: no such kernel\n"


def test_torchaos_layer_is_converted_and_trained(monkeypatch):
    converted = []
    library = ModuleType("torchao.float8")
    library.convert_to_float8_training = converted.append
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", library)
    x, weight = torch.randn(4, 32, requires_grad=True), torch.randn(16, 32)
    float8_peers._torchao(x, weight, torch.ones(4, 16).bfloat16())()
    assert torch.equal(converted[0][0].weight, weight)
