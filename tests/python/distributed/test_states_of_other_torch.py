# SPDX-License-Identifier: Apache-2.0
"""Files that torch 2.11 has written are read by the torch that is here, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from support.past_torch import FOLDER, KINDS, Trained, folder_of, told
from support.simulated_ranks import run_on_ranks

EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


def assert_reads(trained: Trained, state: Any, kind: str) -> None:
    assert told(state) == EXPECTED[kind]["read"]
    trained.load(state)
    assert told(trained.state()) == EXPECTED[kind]["read"]
    trained.train(range(3, 5))
    assert told(trained.state()) == EXPECTED[kind]["later"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_torch_save_has_written(kind):
    states = torch.load(FOLDER / "states.pt", weights_only=True)
    assert_reads(Trained(kind), states[kind], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_distributed_checkpoint_has_written(kind):
    def work(_: int) -> None:
        trained = Trained(kind)
        state = trained.state()
        dcp.load(state, checkpoint_id=folder_of(kind))
        assert_reads(trained, state, kind)

    (outcome,) = run_on_ranks(1, work)
    assert outcome.error is None, outcome.error


def test_the_files_hold_what_they_are_for():
    for kind in KINDS:
        read, later = EXPECTED[kind]["read"], EXPECTED[kind]["later"]
        assert read["/scaler/scale"] != float(8).hex()
        moved = [key for key, bits in read.items() if isinstance(bits, list) and bits != later[key]]
        assert {"/model/weight", "/model/bias"} <= set(moved)
        assert any("exp_avg_8" in key for key in moved)
        assert any("remainder" in key for key in read) == (kind == "remainders of masters")
