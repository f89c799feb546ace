# SPDX-License-Identifier: Apache-2.0
"""torch's own regions while fastamp is installed."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.amp import autocast as early_autocast

import fastamp
import fastamp._C as _C
from support.autocast_state import nesting, torch_state
from support.float8 import E4M3

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


def float8_region_of_torch(dtype: torch.dtype) -> torch.autocast:
    """torch's class takes it on CUDA; without a GPU it disables the region."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        region = torch.autocast("cuda", dtype=dtype)
    region._enabled = True
    return region


def has_float8() -> bool:
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not has_float8(), reason="a GPU without fp8")
@pytest.mark.usefixtures("installed")
def test_torchs_region_of_a_float8_dtype_on_cuda_is_one_with_the_default_recipe():
    region, before = float8_region_of_torch(E4M3), torch_state()
    forward = torch.utils.checkpoint.CheckpointFunction.forward
    for _ in range(2):
        with region as entered:
            assert entered is region
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == BF16
            assert fastamp.float8.recipe("cuda") == fastamp.float8.Recipe()
            assert fastamp.float8.recipe("cpu") is None
            # What recomputation needs is carried, as in fastamp's own regions.
            assert torch.utils.checkpoint.CheckpointFunction.forward is not forward
            with torch.autocast("cpu", dtype=FP16), region:
                assert fastamp.float8.recipe("cuda") == fastamp.float8.Recipe()
            assert fastamp.float8.recipe("cuda") == fastamp.float8.Recipe()
        assert fastamp.float8.recipe("cuda") is None
        assert torch_state() == before
        assert torch.utils.checkpoint.CheckpointFunction.forward is forward
    assert region.fast_dtype == E4M3


@pytest.mark.usefixtures("installed")
def test_other_float8_dtypes_are_refused_on_entering_before_anything_changes():
    region, before = float8_region_of_torch(torch.float8_e5m2), torch_state()
    with pytest.raises(ValueError, match=r"autocast.__enter__: expected dtype .* got Float8_e5m2"):
        region.__enter__()
    assert torch_state() == before
    assert _C.open_torch_regions() == 0


def test_a_float8_dtype_means_to_torch_what_it_meant_without_fastamp():
    with warnings.catch_warnings(record=True) as plain:
        warnings.simplefilter("always")
        region = torch.autocast("cpu", dtype=E4M3)
    with fastamp.install(), warnings.catch_warnings(record=True) as own, region:
        warnings.simplefilter("always")
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.autocast("cpu", dtype=E4M3)._enabled
    assert [str(warning.message) for warning in own] == [str(w.message) for w in plain] != []
    with float8_region_of_torch(E4M3):  # not installed
        assert torch.get_autocast_dtype("cuda") == E4M3
        assert fastamp.float8.recipe("cuda") is None
