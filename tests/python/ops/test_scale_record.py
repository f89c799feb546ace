# SPDX-License-Identifier: Apache-2.0
"""What update_scale_ leaves beside the scale: its inverse and a row of history."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.amp_reference import DEVICES, ScaleRule, assert_same_bits, update_scale_

devices = pytest.mark.parametrize("device", DEVICES)


class Recorded:
    """A scale with all that can be recorded of it."""

    def __init__(self, scale, capacity, device="cpu"):
        self.scale = torch.tensor(scale, device=device)
        self.tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.outputs = {
            "inv_scale": torch.full((), -1.0, device=device),
            "history": torch.full((capacity, 4), -5.0, device=device),
            "history_count": torch.zeros((), dtype=torch.int64, device=device),
        }

    def update(self, flag, norm=None, interval=3, **options):
        found_inf = torch.tensor(flag, device=self.scale.device)
        update_scale_(self.scale, self.tracker, found_inf, 2.0, 0.5, interval,
                      norm=norm, **self.outputs, **options)  # fmt: skip


def torch_inverse(scale):
    """As torch.amp.GradScaler.unscale_ takes it."""
    return scale.double().reciprocal().float()


@devices
@pytest.mark.parametrize("start", [65536.0, 3.0, 1e-38, 1e-45, 2.0**127, 0.7])
def test_inverse_is_that_of_the_new_scale(device, start):
    record = Recorded(start, 1, device)
    for flag in (0.0, 1.0, 0.0, 0.0, 0.0, math.nan, 1.0):
        record.update(flag)
        assert_same_bits(record.outputs["inv_scale"], torch_inverse(record.scale))


def test_inverse_of_zero_is_infinite():
    record = Recorded(1e-45, 1)
    record.update(1.0)
    assert record.scale.item() == 0.0
    assert record.outputs["inv_scale"].item() == math.inf


@given(
    flags=st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0, math.nan]), max_size=30),
    norms=st.sampled_from([None, torch.float32, torch.float64]),
    capacity=st.integers(1, 7),
    before=st.integers(0, 2**40),
)
@settings(max_examples=100, deadline=None)
def test_history_is_a_ring_of_the_last_steps(flags, norms, capacity, before):
    record = Recorded(64.0, capacity)
    record.outputs["history_count"].fill_(before)
    expected = [[-5.0] * 4 for _ in range(capacity)]
    state = (64.0, 0, 1)
    for i, flag in enumerate(flags):
        norm = None if norms is None else torch.tensor(i + 0.1, dtype=norms)
        record.update(flag, norm)
        used, state = state[0], ScaleRule().step(*state, flag)
        row = [
            used,
            float(flag != 0.0),
            math.nan if norm is None else norm.float().item(),
            state[1],
        ]
        expected[(before + i) % capacity] = row
        got = record.outputs["history"]
        assert_same_bits(got, torch.tensor(expected))
    assert record.outputs["history_count"].item() == before + len(flags)
    assert record.scale.item() == state[0]


@devices
@pytest.mark.parametrize("flag", [0.0, 1.0, math.nan])
@pytest.mark.parametrize("new_scale", [3.0, 0.0, math.inf, math.nan, -7.5])
def test_a_scale_that_is_given_is_taken_and_the_trackers_stay(device, flag, new_scale):
    record = Recorded(64.0, 2, device)
    left = torch.tensor(1, dtype=torch.int32, device=device)
    for _ in range(2):
        record.update(0.0)
    given_scale = torch.tensor([new_scale], device=device)
    record.update(flag, hysteresis_tracker=left, hysteresis=2, min_scale=1.0, max_scale=2.0,
                  new_scale=given_scale)  # fmt: skip
    assert_same_bits(record.scale, given_scale[0])
    assert_same_bits(record.outputs["inv_scale"], torch_inverse(record.scale))
    assert (record.tracker.item(), left.item()) == (2, 1)
    row = [64.0, float(flag != 0.0), math.nan, 2.0]
    assert_same_bits(record.outputs["history"][0], torch.tensor(row, device=device))
    assert record.outputs["history_count"].item() == 3
    assert given_scale._version == 0


@devices
def test_opcheck(device):
    record = Recorded(4.0, 3, device)
    found_inf = torch.zeros(1, device=device)
    for norm in (None, torch.ones((), device=device), torch.ones(1, device=device).double()):
        torch.library.opcheck(
            update_scale_,
            (record.scale, record.tracker, found_inf, 2.0, 0.5, 3),
            record.outputs | {"norm": norm},
        )
    torch.library.opcheck(
        update_scale_,
        (record.scale, record.tracker, found_inf, 2.0, 0.5, 3),
        record.outputs | {"new_scale": torch.ones((), device=device)},
    )


def test_versions_of_what_is_recorded_move():
    record, norm = Recorded(4.0, 3), torch.ones(())
    record.update(0.0, norm)
    assert [t._version for t in record.outputs.values()] == [1, 1, 1]
    assert norm._version == 0


REFUSED = {
    "history alone": ({"history_count": None}, ValueError,
                      "history and history_count together, got history alone"),
    "count alone": ({"history": None}, ValueError, "together, got history_count alone"),
    "no rows": ({"history": torch.zeros(0, 4)}, ValueError,
                r"history to be contiguous of shape \[at least 1, 4\], got shape \[0, 4\]"),
    "three columns": ({"history": torch.zeros(5, 3)}, ValueError, r"got shape \[5, 3\]"),
    "strided": ({"history": torch.zeros(4, 5).t()}, ValueError, r"got shape \[5, 4\]"),
    "double history": ({"history": torch.zeros(5, 4).double()}, TypeError,
                       "expected history to be Float, got Double"),
    "int count": ({"history_count": torch.zeros((), dtype=torch.int32)}, TypeError,
                  "expected history_count to be Long, got Int"),
    "half norm": ({"norm": torch.zeros(()).half()}, TypeError, "norm to be Float, got Half"),
    "two norms": ({"norm": torch.zeros(2)}, ValueError, "norm to have one element, got 2"),
    "double new scale": ({"new_scale": torch.zeros(()).double()}, TypeError,
                         "expected new_scale to be Float, got Double"),
    "two new scales": ({"new_scale": torch.zeros(2)}, ValueError,
                       "new_scale to have one element, got 2"),
    "double inverse": ({"inv_scale": torch.zeros(()).double()}, TypeError,
                       "expected inv_scale to be Float, got Double"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_records_change_nothing(case):
    change, error, message = REFUSED[case]
    record = Recorded(8.0, 2)
    before = {name: t.clone() for name, t in record.outputs.items()}
    arguments = record.outputs | change
    found_inf = torch.ones(())
    with pytest.raises(error, match="update_scale_: .*" + message):
        update_scale_(record.scale, record.tracker, found_inf, 2.0, 0.5, 3, **arguments)
    assert (record.scale.item(), record.scale._version) == (8.0, 0)
    for name, t in record.outputs.items():
        assert torch.equal(t, before[name])
