# SPDX-License-Identifier: Apache-2.0
"""What a region is: torch's public state, set inside and put back after."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastamp
from support.autocast_state import cuda_state, torch_state

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REGIONS = [fastamp.autocast, torch.autocast]
MM = torch.ones(4, 4)


def ran_in() -> torch.dtype:
    return torch.mm(MM, MM).dtype


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_public_state_tells_the_truth_inside_and_is_restored_after(dtype: torch.dtype):
    before = torch_state()
    with fastamp.autocast("cpu", dtype=dtype, cache_enabled=False) as region:
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == dtype
        assert not torch.is_autocast_cache_enabled()
        assert torch._C._is_any_autocast_enabled()
        assert torch_state()["nesting"] == before["nesting"] + 1
        assert ran_in() == dtype
        assert isinstance(region, fastamp.autocast)
    assert torch_state() == before
    assert ran_in() == FP32


def test_state_is_restored_after_an_exception_which_goes_on_to_the_caller():
    before = torch_state()
    outer, inner = fastamp.autocast("cpu", dtype=FP16), fastamp.autocast("cpu", enabled=False)
    with pytest.raises(ZeroDivisionError), outer, inner:
        raise ZeroDivisionError
    assert torch_state() == before


@pytest.mark.parametrize("outer", REGIONS)
@pytest.mark.parametrize("middle", REGIONS)
@pytest.mark.parametrize("inner", REGIONS)
def test_regions_nest_with_torchs_in_any_order(outer: Any, middle: Any, inner: Any):
    before = torch_state()
    with outer("cpu", dtype=BF16):
        assert ran_in() == BF16
        with middle("cpu", enabled=False):
            assert ran_in() == FP32
            with inner("cpu", dtype=FP16):
                assert ran_in() == FP16
            assert ran_in() == FP32
        assert ran_in() == BF16
    assert torch_state() == before


def test_default_dtype_is_the_one_in_force():
    with fastamp.autocast("cpu", dtype=FP16):
        assert fastamp.autocast("cpu").fast_dtype == FP16
    assert fastamp.autocast("cpu").fast_dtype == torch.get_autocast_dtype("cpu")


def test_default_cache_flag_is_the_one_in_force_when_the_region_is_made():
    with fastamp.autocast("cpu", cache_enabled=False):
        made_inside = fastamp.autocast("cpu")
        with made_inside:
            assert not torch.is_autocast_cache_enabled()
        with fastamp.autocast("cpu", cache_enabled=True):
            assert torch.is_autocast_cache_enabled()
        assert not torch.is_autocast_cache_enabled()
    with made_inside:
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


def test_cpu_region_inside_a_cuda_one_changes_cpu_alone():
    with cuda_state(FP16):
        with fastamp.autocast("cpu", dtype=BF16):
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == FP16
            assert ran_in() == BF16
        assert ran_in() == FP32
        assert torch.is_autocast_enabled("cuda")
        with fastamp.autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled("cuda")


def decorate_plain(region: Any) -> Callable[[], torch.dtype]:
    @region
    def run(count: int = 3) -> torch.dtype:
        """Doc."""
        if count == 0:
            return ran_in()
        return run(count - 1)

    return run


def test_decorator_covers_calls_recursion_included():
    before = torch_state()
    run = decorate_plain(fastamp.autocast("cpu", dtype=FP16))
    assert run.__name__ == "run"
    assert run.__doc__ == "Doc."
    assert [run(), run()] == [FP16, FP16]
    assert torch_state() == before


def test_decorated_function_restores_the_state_when_it_raises():
    before = torch_state()

    @fastamp.autocast("cpu")
    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch_state() == before


def test_region_is_a_torch_autocast_with_its_signature_and_attributes():
    region = fastamp.autocast("cpu", dtype=FP16, cache_enabled=False)
    torchs = torch.autocast("cpu", dtype=FP16, cache_enabled=False)
    assert isinstance(region, torch.autocast)
    assert isinstance(region, torch.amp.autocast)
    assert isinstance(region, torch.amp.autocast_mode.autocast)
    parameters = list(inspect.signature(fastamp.autocast).parameters.values())
    assert parameters[:-1] == list(inspect.signature(torch.autocast).parameters.values())
    assert parameters[-1] == inspect.Parameter("float8", parameters[-1].KEYWORD_ONLY, default=None)
    for name in ("device", "fast_dtype", "_enabled", "_cache_enabled"):
        assert getattr(region, name) == getattr(torchs, name)
        assert type(getattr(region, name)) is type(getattr(torchs, name))


def test_attributes_changed_on_an_instance_take_effect_as_torchs_do():
    for cls in (torch.autocast, fastamp.autocast):
        region = cls("cpu", dtype=BF16)
        region.fast_dtype = FP16
        with region:
            assert ran_in() == FP16
        region._enabled = False
        with region:
            assert ran_in() == FP32


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda region: pickle.loads(pickle.dumps(region))],
    ids=["copy", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_copied_region_works_as_the_first_one(duplicate: Any, enabled: bool):
    region = fastamp.autocast("cpu", dtype=FP16, enabled=enabled, cache_enabled=False)
    region.note = [1]
    with region:
        other = duplicate(region)
    before = torch_state()
    assert type(other) is fastamp.autocast
    assert other.note == [1]
    with other:
        assert torch.is_autocast_enabled("cpu") == enabled
        assert ran_in() == (FP16 if enabled else FP32)
        assert not torch.is_autocast_cache_enabled()
    assert torch_state() == before


class HalfRegion(fastamp.autocast):
    """The way torch.cuda.amp.autocast is made from torch.autocast."""

    def __init__(self, enabled: bool = True) -> None:
        super().__init__("cpu", dtype=FP16, enabled=enabled)
        self.entered = 0

    def __enter__(self) -> Any:
        self.entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.entered -= 1
        return super().__exit__(*error)


def test_subclass_can_override_init_enter_and_exit():
    region = HalfRegion()
    with region, region:
        assert region.entered == 2
        assert ran_in() == FP16
    assert region.entered == 0
    assert copy.deepcopy(region).entered == 0
    assert region(ran_in)() == FP16


def test_subclass_that_forgets_init_is_refused_on_enter_and_changes_nothing():
    class Bare(fastamp.autocast):
        def __init__(self) -> None:
            pass

    before = torch_state()
    with pytest.raises((RuntimeError, AttributeError)), Bare():
        pass
    assert torch_state() == before


def test_init_called_again_changes_the_region():
    region = fastamp.autocast("cpu", dtype=BF16)
    region.__init__("cpu", dtype=FP16)
    with region:
        assert ran_in() == FP16
        region.__init__("cpu", dtype=BF16)
        assert ran_in() == FP16
    assert ran_in() == FP32


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_grad_modes_nest_on_either_side(mode: Any):
    w = torch.nn.Parameter(torch.ones(4, 4))
    with mode(), fastamp.autocast("cpu"):
        outside = torch.mm(MM, w)
    with fastamp.autocast("cpu"), mode():
        inside = torch.mm(MM, w)
    assert outside.dtype == inside.dtype == BF16
    assert outside.requires_grad == inside.requires_grad == (mode is torch.enable_grad)
    assert outside.is_inference() == inside.is_inference() == (mode is torch.inference_mode)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_other_device_types_are_left_to_torch(device: str):
    results = []
    for cls in (torch.autocast, fastamp.autocast):
        before = torch_state()
        try:
            with cls(device, dtype=FP16):
                results.append((torch.is_autocast_enabled(device), ran_in()))
        except Exception as error:
            results.append(type(error))
        assert torch_state() == before
    assert results[0] == results[1]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_cuda_region_casts_on_cuda_alone(dtype: torch.dtype):
    x = torch.ones(4, 4, device="cuda")
    with fastamp.autocast("cuda", dtype=dtype):
        assert torch.mm(x, x).dtype == dtype
        assert ran_in() == FP32
        with fastamp.autocast("cpu", dtype=BF16):
            assert ran_in() == BF16
    assert torch.mm(x, x).dtype == FP32
