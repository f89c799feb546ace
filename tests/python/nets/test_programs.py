# SPDX-License-Identifier: Apache-2.0
"""Generated training programs, under torch.amp and under fastamp, bit for bit."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import fastamp
from nets.past_programs import PAST
from nets.program_maker import make
from nets.program_runs import fails, failures
from nets.program_text import Program
from nets.rounds import rounds

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 300  # programs of a round: some 10 s of CPU


@pytest.mark.parametrize("name", PAST)
def test_past_program(name: str):
    reference, source = PAST[name]
    assert not fails(Program(0, reference, (source.strip().replace("\n        ", "\n"),)))


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_every_program_records_the_same_under_both():
    ends, texts = failures(make(seed) for seed in range(COUNT * rounds()))
    assert not texts, "\n\n".join(texts)
    assert ends["ran"] > 0.85 * COUNT * rounds(), ends  # not ended early, not undecided


def test_a_wrong_policy_is_found_and_its_program_runs_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fastamp.policies.set("log_softmax.int", "lower")
    try:
        _, texts = failures((make(seed) for seed in range(100)), most=1)
        assert texts
        source = texts[0].split("def program():")[1].split("replay(")[0]
        assert "log_softmax(" in source
        assert source.count("\n") < 20
        file = tmp_path / "program.py"
        file.write_text(texts[0], encoding="utf-8")
        runpy.run_path(str(file))
        assert "output 0: " in capsys.readouterr().out
    finally:
        fastamp.policies.reset()
    runpy.run_path(str(file))
    assert capsys.readouterr().out == "the same\n"


def test_a_difference_of_one_bit_is_found():
    one_bit = Program(0, "torch", ("record(torch.ones(()) + (2.0**-23 if NEW else 0))",))
    assert "bits" in fails(one_bit)
