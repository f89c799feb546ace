# SPDX-License-Identifier: Apache-2.0
"""Whatever happens on some ranks, all decide the same, make equal collectives, and none hangs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import fastamp
from nets.rank_histories import (
    KINDS,
    History,
    Iteration,
    draw_history,
    fault_of,
    run_history,
    shrunk,
)
from nets.rounds import rounds
from support.simulated_ranks import CallMade, NobodyComesError, RanksDifferError, run_on_ranks

CASES = 40  # In a round.
DOCUMENTED = 1000  # In the guide; `make test-all` runs them all.
GUIDE = Path(__file__).parents[3] / "docs" / "distributed.md"

#: Histories that have failed, as they were shrunk: a collective that only some ranks made, or of
#: other sizes, or an error on some.
PAST = {
    "no gradient of an optimizer on one rank of a mesh": History(
        kind="hsdp",
        ranks=2,
        optimizers=("fastamp SGD", "fastamp SGD", "torch AdamW"),
        iterations=(Iteration(missing=((1, 5), (1, 2))),),
        group=False,
    ),
    "no gradient of an optimizer on one rank, with a group": History(
        kind="stages",
        ranks=2,
        optimizers=("torch AdamW", "torch AdamW"),
        iterations=(Iteration(missing=((1, 3), (1, 1), (1, 5))),),
    ),
    "no gradient of a guarded optimizer on one rank of a mesh": History(
        kind="fsdp+tp",
        ranks=2,
        optimizers=("torch AdamW", "torch AdamW"),
        iterations=(Iteration(missing=((1, 3), (1, 1), (1, 5))),),
        group=False,
        guard=True,
    ),
    "a clip of a guarded optimizer without gradients on one rank of a mesh": History(
        kind="fsdp",
        ranks=8,
        optimizers=("fastamp AdamW",) * 3,
        iterations=(Iteration(missing=((7, 5), (7, 2)), clip="norm"),),
        group=False,
        guard=True,
    ),
    "a clip by value of a guarded optimizer without gradients on one rank": History(
        kind="fsdp",
        ranks=2,
        optimizers=("torch SGD", "fastamp SGD"),
        iterations=(Iteration(missing=((1, 3), (1, 5), (1, 1)), clip="value"),),
        group=False,
        guard=True,
    ),
    "a clip by value of a guarded optimizer, which hides an inf": History(
        kind="fsdp+tp",
        ranks=2,
        optimizers=("fastamp AdamW",),
        iterations=(Iteration(gradients=((1, 5, math.inf),), clip="value"),),
        group=False,
        guard=True,
    ),
    "error_if_nonfinite of a guard where another rank has the inf": History(
        kind="group",
        ranks=5,
        optimizers=("fastamp AdamW",),
        iterations=(Iteration(losses=((4, -math.inf),), clip="error"),),
        guard=True,
    ),
    "a norm with one gradient less on one rank": History(
        kind="hsdp",
        ranks=8,
        optimizers=("torch AdamW",),
        iterations=(Iteration(missing=((7, 4),), clip="norm"),),
        group=False,
    ),
    "error_if_nonfinite where another rank has the inf": History(
        kind="ddp",
        ranks=25,
        optimizers=("fastamp AdamW",),
        iterations=(Iteration(gradients=((24, 4, math.inf),), clip="error"),),
    ),
    "error_if_nonfinite where a copy on another rank of a mesh has the NaN": History(
        kind="hsdp",
        ranks=2,
        optimizers=("fastamp AdamW",),
        iterations=(Iteration(gradients=((1, 2, math.nan),), clip="error"),),
        group=False,
    ),
    "error_if_nonfinite of a guard where a copy on another rank of a mesh has it": History(
        kind="hsdp",
        ranks=4,
        optimizers=("torch AdamW",),
        iterations=(Iteration(gradients=((3, 2, math.inf),), clip="error"),),
        group=False,
        guard=True,
    ),
    "a clip by value without gradients on one rank": History(
        kind="fsdp",
        ranks=2,
        optimizers=("torch AdamW", "torch SGD"),
        iterations=(Iteration(missing=((1, 4), (1, 2), (1, 0)), clip="value"),),
        group=False,
    ),
    "error_if_nonfinite on gradients that are unscaled at once": History(
        kind="group",
        ranks=2,
        optimizers=("torch SGD",),
        iterations=(Iteration(gradients=((1, 0, math.nan),), clip="error"),),
    ),
}


def assert_holds(history: History) -> None:
    fault = fault_of(history)
    if fault is not None:
        smallest, why = shrunk(history)
        pytest.fail(f"{fault}\n\nfor PAST:\n{smallest}\n{why}")


@pytest.mark.parametrize("name", PAST)
def test_histories_that_have_failed_do_not(name):
    assert_holds(PAST[name])


def test_drawn_histories_hold():
    for seed in range(CASES * rounds()):
        history = draw_history(seed)
        if not history.guard:
            assert_holds(history)


def test_drawn_histories_with_a_guard_hold():
    for seed in range(CASES * rounds()):
        history = draw_history(seed)
        if history.guard:
            assert_holds(history)


@pytest.mark.long
def test_the_other_histories_of_the_guide_hold():
    for seed in range(CASES * rounds(), DOCUMENTED):
        assert_holds(draw_history(seed))


def test_the_table_of_the_guide_has_what_is_drawn():
    text = GUIDE.read_text(encoding="utf-8")
    table = text[text.index("| Ranks hold | Histories |") :].split("\n\n")[0]
    drawn = [draw_history(seed) for seed in range(DOCUMENTED)]
    of_kind = [[history for history in drawn if history.kind == kind] for kind in KINDS]
    numbers = [
        [len(found), sum(len(h.iterations) for h in found), max(h.ranks for h in found)]
        for found in of_kind
    ]
    rows = [line.strip("| ").split("|")[1:] for line in table.splitlines()[2:]]
    assert [[int(cell) for cell in cells] for cells in rows] == numbers
    raise_ = [h for h in drawn if any(i.raises is not None for i in h.iterations)]
    guarded = sum(history.guard for history in drawn)
    assert f"{guarded} of them have a guard in the scaler's place, and in {len(raise_)} a" in text


def test_they_are_of_all_kinds_and_up_to_64_ranks():
    drawn = [draw_history(seed) for seed in range(DOCUMENTED)]
    assert {history.kind for history in drawn} == set(KINDS)
    assert max(history.ranks for history in drawn) == 64
    iterations = [iteration for history in drawn for iteration in history.iterations]
    for name in Iteration.__dataclass_fields__:
        assert any(getattr(iteration, name) for iteration in iterations), name


# Whether they would find anything.


def test_a_rank_that_steps_alone_is_found(monkeypatch):
    """The agreement is lost: each rank goes by its own flag."""
    history = History(
        kind="group",
        ranks=4,
        optimizers=("torch SGD",),
        iterations=(Iteration(gradients=((2, 1, math.nan),)),),
    )
    assert fault_of(history) is None
    monkeypatch.setattr(fastamp.GradScaler, "_agree_on", lambda *_: None)
    assert "skipped [False], expected [True]" in fault_of(history)


def test_one_collective_more_on_one_rank_is_found(monkeypatch):
    agree = fastamp.GradScaler._agree_on

    def twice(scaler, flag):
        agree(scaler, flag)
        if torch.distributed.get_rank() == 1:
            agree(scaler, flag)

    history = History("ddp", 3, ("fastamp SGD",), (Iteration(),))
    assert fault_of(history) is None
    monkeypatch.setattr(fastamp.GradScaler, "_agree_on", twice)
    assert "timed out after" in fault_of(history)


def test_a_rank_that_raises_ends_the_wait_of_the_others():
    history = History("ddp", 4, ("fastamp SGD",), (Iteration(), Iteration(raises=2), Iteration()))
    outcomes = run_history(history)
    assert [len(outcome.result) for outcome in outcomes] == [1, 1, 1, 1]
    assert str(outcomes[2].error) == "a fault of the program"
    for rank in (0, 1, 3):
        error = outcomes[rank].error
        assert isinstance(error.__cause__, NobodyComesError)
        # The error names what waited, and the group's timeout.
        assert "expected all 4 ranks of a group to come and agree on an overflow" in str(error)
        assert "timeout" in str(error)


# The simulation itself.


def test_simulated_ranks_sum_and_differ():
    def work(rank):
        value = torch.full((2,), float(rank))
        torch.distributed.all_reduce(value)
        return value.tolist(), torch.distributed.get_world_size()

    outcomes = run_on_ranks(5, work, seed=3)
    assert [outcome.result for outcome in outcomes] == [([10.0, 10.0], 5)] * 5
    assert outcomes[0].calls == [CallMade("AllReduce", 5, (("float32", 2),))]
    assert outcomes[0].calls[0].bytes == 8


def test_ranks_that_meet_in_different_calls_are_told():
    outcomes = run_on_ranks(2, lambda rank: torch.distributed.all_reduce(torch.ones(rank + 1)))
    assert [type(outcome.error) for outcome in outcomes] == [RanksDifferError, RanksDifferError]


def test_a_rank_that_waits_for_one_that_has_ended_is_told():
    outcomes = run_on_ranks(
        2, lambda rank: torch.distributed.all_reduce(torch.ones(1)) if rank else None
    )
    assert outcomes[0].error is None
    assert isinstance(outcomes[1].error, NobodyComesError)
