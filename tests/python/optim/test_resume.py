# SPDX-License-Identifier: Apache-2.0
"""Training that is interrupted at any step, killed even, continues as if it had not been."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.children import child_environment
from support.optim_resume_child import load, make, save, train_step
from support.optim_twins import assert_same_parameters

CHILD = Path(__file__).parents[1] / "support" / "optim_resume_child.py"
names = pytest.mark.parametrize(
    ("name", "dtype"), [("SGD", "float32"), ("AdamW", "float32"), ("AdamW", "bfloat16")]
)
scalers = pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])


def uninterrupted(name, dtype, scaled, steps):
    parts = make(name, dtype, scaled=scaled)
    for step in range(steps):
        train_step(*parts, step)
    return parts


def assert_same_training(first, second):
    assert_same_parameters(first[0].parameters(), second[0].parameters())
    state, other = (parts[1].state_dict() for parts in (first, second))
    assert state["param_groups"] == other["param_groups"]
    for index, entry in state["state"].items():
        assert all(torch.equal(entry[key], other["state"][index][key]) for key in entry)
    assert first[2].state_dict() == second[2].state_dict()
    assert first[3].state_dict() == second[3].state_dict()


@names
@scalers
def test_resumed_at_any_step(name, dtype, scaled, tmp_path):
    last = 8
    whole = uninterrupted(name, dtype, scaled, last)
    for stop in range(last + 1):
        save(tmp_path / "checkpoint.pt", stop, *uninterrupted(name, dtype, scaled, stop))
        parts = make(name, dtype, scaled=scaled)
        for step in range(load(tmp_path / "checkpoint.pt", *parts), last):
            train_step(*parts, step)
        assert_same_training(parts, whole)


@names
@scalers
def test_killed_at_no_matter_which_moment(name, dtype, scaled, tmp_path):
    child = subprocess.Popen(
        [sys.executable, str(CHILD), name, dtype, "scaled" if scaled else "plain", str(tmp_path)],
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        seen = 0
        while seen < 5:  # Then some time goes by, in the middle of whatever it does.
            line = child.stdout.readline()
            assert line, "the child ended by itself"
            seen += 1
    finally:
        child.kill()  # SIGKILL: nothing is written any more.
        child.wait()
        child.stdout.close()
    parts = make(name, dtype, scaled=scaled)
    resumed_at = load(tmp_path / "checkpoint.pt", *parts)
    assert resumed_at >= 5
    for step in range(resumed_at, resumed_at + 5):
        train_step(*parts, step)
    assert_same_training(parts, uninterrupted(name, dtype, scaled, resumed_at + 5))
