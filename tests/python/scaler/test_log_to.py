# SPDX-License-Identifier: Apache-2.0
"""fastamp.debug.log_to: rows of iterations for loggers."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastamp
from patience import patience
from support.scaler_steps import INF, model_and_optimizer, step

ROWS = list[tuple[dict[str, float], int]]


class Board:
    """Has what SummaryWriter has."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert global_step is not None
        self.scalars.append((tag, scalar_value, global_step))


class Run:
    """Has what a run of Weights & Biases has."""

    def __init__(self) -> None:
        self.rows: ROWS = []

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((data, step))


def train(scaler: Any, steps: int = 3, bad: int | None = None) -> None:
    model, optimizer = model_and_optimizer()
    for number in range(steps):
        step(scaler, model, optimizer, {"0.bias": [INF]} if number == bad else None)


def test_a_function_gets_what_happened():
    rows: ROWS = []
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    with fastamp.debug.log_to(lambda values, step: rows.append((values, step)), scaler) as log:
        assert repr(log) == "<log_to, of 1 scalers>"
        x = torch.ones(4, 4)
        with fastamp.autocast("cpu"):
            torch.mm(x, x.clone())
        train(scaler, 4, bad=1)
        assert [number for _, number in rows] == [0, 1, 2, 3]  # Each by its own update().
    train(scaler)
    history = scaler.history()
    assert len(rows) == 4
    assert repr(log) == "<log_to, released>"
    for (values, number), past in zip(rows, history, strict=False):
        assert number == past.step
        assert values["amp/scale"] == past.scale
        assert values["amp/skipped"] == past.skipped == (number == 1)
        assert values["amp/overflows"] == (1 if number == 1 else 0)
        if past.skipped:
            assert "amp/norm" not in values
        else:
            assert values["amp/norm"] == past.norm
        assert values.get("amp/underflows") == (None if number == 3 else 0)
        assert values["amp/casts"] == (2 if number == 0 else 0)
        assert values["amp/cast_bytes"] == (64 if number == 0 else 0)


def test_objects_with_add_scalar_and_with_log():
    board, run = Board(), Run()
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    logs = [
        fastamp.debug.log_to(board, scaler, prefix="scaler", casts=False),
        fastamp.debug.log_to(run, scaler, prefix="scaler", casts=False),
    ]
    train(scaler, 2)
    for log in logs:
        log.release()
        log.release()
    assert [row["scaler/scale"] for row, _ in run.rows] == [8.0, 8.0]
    assert "scaler/casts" not in run.rows[0][0]
    assert board.scalars == [
        (name, value, number) for row, number in run.rows for name, value in row.items()
    ]


def test_without_a_scaler_all_that_come_into_use_are_logged():
    rows: ROWS = []
    earlier, later, disabled, without = (
        fastamp.GradScaler("cpu", **options)
        for options in ({}, {}, {"enabled": False}, {"history_size": 0})
    )
    train(earlier, 1)
    with fastamp.debug.log_to(lambda *row: rows.append(row)):
        for scaler in (earlier, later, disabled, without, copy.deepcopy(earlier)):
            train(scaler, 1)
    train(fastamp.GradScaler("cpu"))
    assert [(next(iter(values)), step) for values, step in rows] == [
        ("amp/scale", 0),
        ("amp2/scale", 0),  # The copy counts its own iterations.
    ]


def test_a_state_that_is_loaded_goes_on_with_its_steps():
    scaler = fastamp.GradScaler("cpu", history_size=4)
    train(scaler, 3)
    state = scaler.state_dict()
    rows: ROWS = []
    other = fastamp.GradScaler("cpu", history_size=4)
    with fastamp.debug.log_to(lambda *row: rows.append(row), other):
        train(other, 1)
        other.load_state_dict(state)
        train(other, 1)
    assert [number for _, number in rows] == [0, 3]


def test_a_graphed_step_is_logged():
    rows: ROWS = []
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = fastamp.optim.SGD(model.parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    sample = (torch.ones(1, 2), torch.ones(1, 1))
    train_step = fastamp.cuda.graphed_step(
        model, lambda y, factor: (y * factor).sum(), optimizer, scaler, sample, autocast=False
    )
    with fastamp.debug.log_to(lambda *row: rows.append(row), scaler):
        train_step(*sample)
        train_step(sample[0], torch.full((1, 1), INF))
    assert [(values["amp/skipped"], values["amp/overflows"]) for values, _ in rows] == [
        (0.0, 0),
        (1.0, 2),
    ]


def test_a_writer_that_raises_ends_the_log_and_not_the_training():
    calls = []

    def writer(_: dict[str, float], step: int) -> None:
        calls.append(step)
        raise OSError("disk full")

    scaler = fastamp.GradScaler("cpu")
    log = fastamp.debug.log_to(writer, scaler)
    with pytest.warns(UserWarning, match=r"raised OSError at step 0 \(disk full\)") as found:
        train(scaler, 3)
    log.release()
    assert calls == [0]
    assert [warning.filename for warning in found] == [step.__code__.co_filename]  # of update()
    assert len(scaler.history()) == 3


def test_an_interrupt_in_the_writer_is_the_programs_and_the_iteration_is_over():
    def writer(_: dict[str, float], step: int) -> None:
        if step == 1:
            raise KeyboardInterrupt

    scaler = fastamp.GradScaler("cpu")
    model, optimizer = model_and_optimizer()
    with fastamp.debug.log_to(writer, scaler):
        step(scaler, model, optimizer)
        with pytest.raises(KeyboardInterrupt):
            step(scaler, model, optimizer)
        step(scaler, model, optimizer)
    assert [row.step for row in scaler.history()] == [0, 1, 2]


def test_the_writer_may_ask_the_scaler():
    scales = []
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    with fastamp.debug.log_to(lambda *_: scales.append(scaler.get_scale_async()), scaler):
        train(scaler, 3, bad=0)
    assert scales == [4.0, 4.0, 4.0]


@pytest.mark.parametrize("writer", [3, Board, logging.getLogger("x"), None])
def test_other_writers_are_refused(writer: Any):
    with pytest.raises(TypeError, match="log_to: expected writer to have add_scalar"):
        fastamp.debug.log_to(writer, fastamp.GradScaler("cpu"))


def test_other_bad_arguments_are_refused():
    scaler: Any = torch.amp.GradScaler("cpu")
    if not isinstance(scaler, fastamp.GradScaler):
        with pytest.raises(TypeError, match=r"expected scaler to be a fastamp\.GradScaler"):
            fastamp.debug.log_to(print, scaler)
    own = fastamp.GradScaler("cpu")
    with pytest.raises(TypeError, match="expected prefix to be a str, got int"):
        fastamp.debug.log_to(print, own, prefix=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected casts to be a bool, got int"):
        fastamp.debug.log_to(print, own, casts=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got one of history_size=0"):
        fastamp.debug.log_to(print, fastamp.GradScaler("cpu", history_size=0))
    with fastamp.debug.log_to(print, fastamp.GradScaler("cpu", enabled=False)):
        pass


AT_EXIT = """
import atexit, multiprocessing
import fastamp

class Late:  # A logger whose rows have not arrived.
    def pass_on(self, wait):
        print("written at the end of", multiprocessing.current_process().name, wait, flush=True)
    def drop(self):
        pass

def train():
    log = fastamp.debug.log_to(print, fastamp.GradScaler("cpu"))
    log._loggers[:] = [Late()]

if __name__ == "__main__":
    atexit.register(print, "the writer's own end")
    train()
    child = multiprocessing.get_context("fork").Process(target=train, name="child")
    child.start()
    child.join()
"""


def test_rows_that_are_on_their_way_at_the_end_are_written_before_the_writer_ends(tmp_path: Path):
    program = tmp_path / "train.py"
    program.write_text(AT_EXIT)
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience(60),
    )
    assert done.stdout.splitlines() == [
        "written at the end of child True",
        "written at the end of MainProcess True",
        "the writer's own end",
    ]
