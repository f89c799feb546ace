# SPDX-License-Identifier: Apache-2.0
"""update_scale_ against torch's op, a reference in Python, and its own promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.amp_reference import DEVICES, ScaleRule, fp32, update_scale_
from support.scale_model import ScaleModel

devices = pytest.mark.parametrize("device", DEVICES)


def int_tensor(value: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32, device=device)


def bits(t: torch.Tensor) -> int:
    return int(t.cpu().view(torch.int32).item())


flags = st.sampled_from([0.0, 0.0, 0.0, 1.0, 2.0, 0.5, -1.0, math.inf, math.nan, -0.0])
factors = st.floats(min_value=1e-3, max_value=1e3)


@given(
    start=st.floats(width=32, allow_nan=False),
    growth=factors,
    backoff=factors,
    interval=st.integers(-1, 5),
    tracker=st.integers(-2, 6),
    history=st.lists(flags, max_size=60),
)
@settings(max_examples=300, deadline=None)
def test_defaults_equal_torch(start, growth, backoff, interval, tracker, history):
    torchs = (torch.tensor(start), int_tensor(tracker))
    own = (torch.tensor(start), int_tensor(tracker))
    for flag in history:
        found_inf = torch.tensor(flag)
        torch._amp_update_scale_(*torchs, found_inf, growth, backoff, interval)
        update_scale_(*own, found_inf, growth, backoff, interval)
        assert bits(own[0]) == bits(torchs[0])
        assert own[1].item() == torchs[1].item()


@devices
@pytest.mark.parametrize("seed", range(20))
def test_long_histories_equal_torch(device, seed):
    generator = torch.Generator().manual_seed(seed)
    history = torch.rand(500, generator=generator).lt(0.05 + 0.02 * seed).float().to(device)
    torchs = (torch.tensor(65536.0, device=device), int_tensor(0, device))
    own = (torch.tensor(65536.0, device=device), int_tensor(0, device))
    for flag in history:
        torch._amp_update_scale_(*torchs, flag, 1.9, 0.45, 4)
        update_scale_(*own, flag, 1.9, 0.45, 4)
        assert bits(own[0]) == bits(torchs[0])
    assert own[1].item() == torchs[1].item()


@given(
    history=st.lists(flags, max_size=80),
    start=st.floats(min_value=2**-10, max_value=2.0**127, width=32),
    growth=factors,
    backoff=factors,
    interval=st.integers(1, 4),
    hysteresis=st.integers(1, 4),
    bounds=st.tuples(st.none() | st.floats(2**-12, 1.0), st.none() | st.floats(1.0, 2.0**100)),
)
@settings(max_examples=300, deadline=None)
def test_options_follow_the_reference(
    history, start, growth, backoff, interval, hysteresis, bounds
):
    rule = ScaleRule(growth, backoff, interval, hysteresis, *bounds)
    scale, tracker = torch.tensor(start), int_tensor(0)
    left = int_tensor(hysteresis)
    expected = (start, 0, hysteresis)
    for flag in history:
        update_scale_(
            scale, tracker, torch.tensor(flag), growth, backoff, interval,
            hysteresis_tracker=left, hysteresis=hysteresis,
            min_scale=bounds[0], max_scale=bounds[1],
        )  # fmt: skip
        expected = rule.step(*expected, flag)
        assert (scale.item(), tracker.item(), left.item()) == expected


@devices
@pytest.mark.parametrize("seed", range(10))
def test_fast_growth_follows_an_independent_model(device, seed):
    generator = torch.Generator().manual_seed(seed)
    flags = torch.rand(400, generator=generator).lt(0.02 * (seed + 1)).float().to(device)
    model = ScaleModel(1024.0, 1.9, 0.45, growth_interval=20, fast_growth_interval=seed % 4 + 1)
    scale, tracker = torch.tensor(1024.0, device=device), int_tensor(0, device)
    limit = torch.tensor(math.inf, device=device)
    for flag in flags:
        update_scale_(
            scale, tracker, flag, 1.9, 0.45, 20,
            fast_growth_limit=limit, fast_growth_interval=seed % 4 + 1,
        )  # fmt: skip
        model.step(bool(flag))
        assert (scale.item(), tracker.item(), limit.item()) == (
            model.scale,
            model.clean,
            model.limit,
        )


@devices
def test_growth_stops_at_the_largest_power_and_backoff_reaches_zero(device):
    scale, tracker = torch.tensor(2.0**126, device=device), int_tensor(0, device)
    clean, overflow = torch.zeros((), device=device), torch.ones((), device=device)
    for _ in range(3):
        update_scale_(scale, tracker, clean, 2.0, 0.5, 1)
    assert scale.item() == 2.0**127
    for _ in range(400):
        update_scale_(scale, tracker, overflow, 2.0, 0.5, 1)
    assert scale.item() == 0.0


@devices
def test_bounds_apply_to_a_scale_that_starts_outside(device):
    scale, tracker = torch.tensor(1e-4, device=device), int_tensor(0, device)
    clean = torch.zeros((), device=device)
    update_scale_(scale, tracker, clean, 2.0, 0.5, 100, min_scale=0.1, max_scale=4.0)
    assert scale.item() == fp32(0.1)
    scale.fill_(1e9)
    update_scale_(scale, tracker, clean, 2.0, 0.5, 100, min_scale=0.1, max_scale=4.0)
    assert scale.item() == 4.0


@devices
def test_opcheck(device):
    state = (torch.tensor(4.0, device=device), int_tensor(0, device), torch.zeros(1, device=device))
    torch.library.opcheck(update_scale_, (*state, 2.0, 0.5, 3))
    torch.library.opcheck(
        update_scale_,
        (*state, 2.0, 0.5, 3),
        {
            "hysteresis_tracker": int_tensor(2, device),
            "hysteresis": 2,
            "min_scale": 1.0,
            "max_scale": 8.0,
            "fast_growth_limit": torch.tensor(math.inf, device=device),
            "fast_growth_interval": 1,
        },
    )


def test_versions_of_what_changes_move_and_no_other():
    scale, tracker, flag, left = torch.tensor(4.0), int_tensor(0), torch.zeros(1), int_tensor(2)
    update_scale_(scale, tracker, flag, 2.0, 0.5, 3, hysteresis_tracker=left, hysteresis=2)
    assert [t._version for t in (scale, tracker, left, flag)] == [1, 1, 1, 0]


REFUSED = {
    "half scale": ({"scale": torch.ones((), dtype=torch.float16)}, TypeError,
                   "expected scale to be Float, got Half"),
    "two scales": ({"scale": torch.ones(2)}, ValueError, "scale to have one element, got 2"),
    "long tracker": ({"growth_tracker": torch.zeros((), dtype=torch.int64)}, TypeError,
                     "expected growth_tracker to be Int, got Long"),
    "meta flag": ({"found_inf": torch.zeros((), device="meta")}, ValueError,
                  "expected found_inf on cpu, the device of scale, got meta"),
    "hysteresis 0": ({"hysteresis": 0}, ValueError, r"hysteresis in \[1, 2147483647\], got 0"),
    "hysteresis 2**31": ({"hysteresis": 2**31}, ValueError, "got 2147483648"),
    "no tracker": ({"hysteresis": 2}, ValueError,
                   "expected a hysteresis_tracker with hysteresis 2, got None"),
    "float hysteresis tracker": ({"hysteresis_tracker": torch.ones(())}, TypeError,
                                 "expected hysteresis_tracker to be Int, got Float"),
    "interval without limit": ({"fast_growth_interval": 2}, ValueError,
                               "fast_growth_interval above 0 together, .* 2 without a limit"),
    "limit without interval": ({"fast_growth_limit": torch.ones(())}, ValueError,
                               "fast_growth_interval above 0 together, .* 0 with a limit"),
    "negative interval": ({"fast_growth_interval": -1}, ValueError,
                          "expected fast_growth_interval >= 0, got -1"),
    "int limit": ({"fast_growth_limit": int_tensor(2), "fast_growth_interval": 2}, TypeError,
                  "expected fast_growth_limit to be Float, got Int"),
    "bounds crossed": ({"min_scale": 4.0, "max_scale": 2.0}, ValueError,
                       "expected min_scale <= max_scale, got 4 > 2"),
    "NaN bound": ({"min_scale": math.nan}, ValueError, "expected min_scale to be a number"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls_change_nothing(case):
    change, error, message = REFUSED[case]
    arguments = {
        "scale": torch.tensor(8.0),
        "growth_tracker": int_tensor(1),
        "found_inf": torch.ones(()),
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
    }
    scale, tracker = arguments["scale"], arguments["growth_tracker"]
    with pytest.raises(error, match="update_scale_: .*" + message):
        update_scale_(**(arguments | change))
    assert (scale.item(), tracker.item()) == (8.0, 1)
    assert (scale._version, tracker._version) == (0, 0)
