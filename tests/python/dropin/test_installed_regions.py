# SPDX-License-Identifier: Apache-2.0
"""torch's own regions while fastamp is installed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.amp import autocast as early_autocast

import fastamp
import fastamp._C as _C
from support.autocast_state import nesting, torch_state

BF16, FP16 = torch.bfloat16, torch.float16
REGIONS = [
    lambda: torch.autocast("cpu"),
    lambda: torch.amp.autocast("cpu", dtype=FP16),
    lambda: torch.cpu.amp.autocast(),
    lambda: early_autocast("cpu", cache_enabled=False),
]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


@pytest.mark.parametrize("make", REGIONS)
@pytest.mark.usefixtures("installed")
def test_torchs_regions_run_native_and_leave_no_trace(make: Any):
    region = make()
    before = torch_state()
    with region as entered:
        assert entered is region
        assert _C.open_torch_regions() == 1
        assert product() == region.fast_dtype
        assert torch.is_autocast_cache_enabled() == region._cache_enabled
    assert torch_state() == before
    assert _C.open_torch_regions() == 0
    assert "prev" not in vars(region)


def test_regions_made_before_are_native_after():
    region = torch.autocast("cpu")
    decorated = region(product)
    with region:
        assert _C.open_torch_regions() == 0
    with fastamp.install():
        with region:
            assert _C.open_torch_regions() == 1
        assert decorated() == BF16
    with region:
        assert _C.open_torch_regions() == 0
        assert product() == BF16


@pytest.mark.usefixtures("installed")
def test_one_region_object_may_be_reentered_and_left_by_hand():
    region = torch.autocast("cpu")
    before = torch_state()
    with region, torch.autocast("cpu", enabled=False), region:
        assert product() == BF16
    assert torch_state() == before
    type(region).__enter__(region)
    with ExitStack() as stack:
        stack.enter_context(region)
        assert nesting() == 2
    region.__exit__(None, None, None)
    assert torch_state() == before


@pytest.mark.usefixtures("installed")
def test_leaving_a_region_that_is_not_open_is_refused_and_changes_nothing():
    before = torch_state()
    with pytest.raises(
        RuntimeError, match=r"autocast.__exit__: expected a region that was entered"
    ):
        torch.autocast("cpu").__exit__(None, None, None)
    assert torch_state() == before


@pytest.mark.usefixtures("installed")
def test_exceptions_pass_through_and_the_state_comes_back():
    before = torch_state()
    with pytest.raises(KeyError, match="inside"), torch.autocast("cpu", dtype=FP16):
        raise KeyError("inside")
    assert torch_state() == before


@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    [
        ("device", 3, "device to be a str, got int"),
        ("fast_dtype", "bfloat16", "dtype to be a torch.dtype, got str"),
        ("_enabled", 1, "enabled to be a bool, got int"),
        ("_cache_enabled", None, "cache_enabled to be a bool, got NoneType"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_damaged_region_is_refused_before_anything_changes(attribute: str, value: Any, text: str):
    region = torch.autocast("cpu")
    setattr(region, attribute, value)
    before = torch_state()
    with pytest.raises(TypeError, match=text):
        region.__enter__()
    delattr(region, attribute)
    with pytest.raises(AttributeError, match=attribute):
        region.__enter__()
    assert torch_state() == before
