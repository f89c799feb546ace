# SPDX-License-Identifier: Apache-2.0
"""Which rank had inf or NaN: overflow reports of simulated ranks, gathered or merged."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import fastamp
from fastamp._scaler.rank_reports import BYTES, merged
from fastamp._scaler.reports import NonFiniteGradient, OverflowReport
from support.simulated_ranks import own_calls, run_on_ranks


def skip_one(bad, parameters=3, name="stage{rank}.weight{number}", report=None):
    """On each rank a step that is skipped because (rank, parameter) of ``bad`` have inf."""

    def work(rank):
        weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(parameters)]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        scaler = fastamp.GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
        scaler.scale(torch.ones(()))
        for number, weight in enumerate(weights):
            weight.grad = torch.ones(4)
            for value in bad.get((rank, number), ()):
                weight.grad[value[0]] = value[1]
        scaler.step(optimizer)
        scaler.update()
        named = [(name.format(rank=rank, number=n), w) for n, w in enumerate(weights)]
        before = len(own_calls())
        made = scaler.overflow_report(named, group=dist.group.WORLD)
        return made if report is None else report(scaler, named), len(own_calls()) - before

    outcomes = run_on_ranks(4, work)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
    return [outcome.result for outcome in outcomes], outcomes


BAD = {(2, 1): [(0, math.inf), (3, math.nan)], (3, 0): [(1, math.nan)]}


def test_the_first_rank_names_rank_and_parameter():
    results, _ = skip_one(BAD)
    report = results[0][0]
    found = [(g.rank, g.name, g.inf, g.nan) for g in report.gradients]
    assert found == [(2, "stage2.weight1", 1, 1), (3, "stage3.weight0", 0, 1)]
    assert (report.step, report.scale, report.more) == (0, 8.0, 0)
    assert "  rank 2  stage2.weight1  (4,)  inf 1  NaN 1" in str(report).splitlines()
    assert results[1][0].gradients == []
    assert [g.rank for g in results[2][0].gradients] == [2]


def test_a_finite_step_sends_nothing_and_an_overflow_a_bounded_number_of_bytes():
    results, outcomes = skip_one({})
    assert [calls for _, calls in results] == [0] * 4
    assert not results[0][0]
    results, outcomes = skip_one(BAD)
    assert [calls for _, calls in results] == [1] * 4
    for outcome in outcomes[1:]:  # The first one receives.
        assert outcome.calls[-1].kind == "Gather"
        assert outcome.calls[-1].sizes == (("uint8", BYTES),)


def test_what_does_not_fit_is_counted_and_the_worst_is_named():
    bad = {(1, number): [(0, math.inf)] for number in range(60)}
    bad[1, 37] = [(0, math.inf), (1, math.nan)]
    results, _ = skip_one(bad, 60, "a" * 300 + "{number}.{rank}")
    report = results[0][0]
    assert report.gradients[0].index == 37
    assert report.gradients[0].name == "a" * 200 + "..."
    assert len(report.gradients) + report.more == 60
    assert len(report.gradients) >= 5
    assert str(report).splitlines()[0].endswith("60 gradients with inf or NaN.")
    assert f"  and {report.more} more" in str(report).splitlines()


def test_files_of_ranks_are_merged(tmp_path):
    def write(scaler, named):
        return scaler.overflow_report(named).write(tmp_path / "overflow.json")

    results, _ = skip_one(BAD, report=write)
    paths = [path for path, _ in results]
    assert [path.name for path in paths] == [f"overflow.rank{rank}.json" for rank in range(4)]
    command = [sys.executable, "-m", "fastamp", "merge", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == str(skip_one(BAD)[0][0][0]) + "\n"
    data = [*command[:4], "--json", "-", *command[4:]]
    done = subprocess.run(data, capture_output=True, text=True, check=True)
    record = json.loads(done.stdout)
    assert record["fastamp"]["report"] == "merge"
    assert record["step"] == skip_one(BAD)[0][0][0].step
    done = subprocess.run([*command, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"python -m fastamp merge: {__file__}: ")
    done = subprocess.run(command[:4], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("python -m fastamp merge: expected files, got none\n")


def test_reports_of_earlier_steps_are_left_out():
    def report(step, rank):
        return OverflowReport(step, 2.0, [NonFiniteGradient("w", 0, (1,), 1, 0, rank)])

    both = merged([report(3, 0), OverflowReport(), report(5, 2)])
    assert (both.step, [g.rank for g in both.gradients]) == (5, [2])
    assert not merged([OverflowReport()])


def test_a_report_without_ranks_is_stored_as_before():
    report = OverflowReport(3, 2.0, [NonFiniteGradient("w", 0, (1,), 1, 0)])
    assert report.as_dict() == {
        "step": 3,
        "scale": 2.0,
        "gradients": [{"name": "w", "index": 0, "shape": (1,), "inf": 1, "nan": 0}],
    }


def test_a_file_that_is_none_is_refused():
    from fastamp._scaler.reports import report_from_dict

    with pytest.raises(ValueError, match="merge: expected x to be what OverflowReport"):
        report_from_dict({"step": 1}, "merge", "x")
