# SPDX-License-Identifier: Apache-2.0
"""Weights are cast once per region, and never when the kept cast would be wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import fastamp
from support.autocast_state import set_torch_state, torch_state
from support.casts import cast_nodes, copies_made

BF16, FP16 = torch.bfloat16, torch.float16
REGIONS = [fastamp.autocast, torch.autocast]
early_bound_clear = torch.clear_autocast_cache


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(BF16)


@pytest.fixture
def w() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))


def by_hand(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.mm(x.to(dtype), w.detach().to(dtype))


@pytest.mark.parametrize("region", REGIONS)
def test_a_weight_is_cast_once_per_region(region: Any, x: torch.Tensor, w: torch.Tensor):
    with region("cpu", dtype=BF16):
        first = [torch.mm(x, w) for _ in range(5)]
    with region("cpu", dtype=BF16):
        second = [torch.mm(x, w) for _ in range(5)]
    assert cast_nodes(w, *first) == 1
    assert cast_nodes(w, *first, *second) == 2


def test_a_weight_is_cast_once_without_grad_mode(x: torch.Tensor, w: torch.Tensor):
    def run() -> None:
        with fastamp.autocast("cpu"), torch.no_grad():
            for _ in range(5):
                torch.mm(x, w)

    assert copies_made(run) == 1


def test_a_weight_is_cast_once_in_inference_mode(x: torch.Tensor, w: torch.Tensor):
    def run() -> None:
        with torch.inference_mode(), fastamp.autocast("cpu"):
            for _ in range(5):
                assert torch.mm(x, w).is_inference()

    assert copies_made(run) == 1


def test_a_weight_is_cast_once_across_nested_regions_of_one_dtype(x: torch.Tensor, w: torch.Tensor):
    with fastamp.autocast("cpu", dtype=BF16):
        outs = [torch.mm(x, w)]
        with fastamp.autocast("cpu", dtype=BF16), torch.autocast("cpu", dtype=BF16):
            outs.append(torch.mm(x, w))
        outs.append(torch.mm(x, w))
    assert cast_nodes(w, *outs) == 1


def test_many_weights_are_each_cast_once(x: torch.Tensor):
    weights = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(500)]
    with fastamp.autocast("cpu"):
        outs = [[torch.mm(x, w) for w in weights] for _ in range(2)]
    assert all(cast_nodes(w, a, b) == 1 for w, a, b in zip(weights, *outs, strict=True))


@pytest.mark.parametrize("region", REGIONS)
def test_without_the_cache_every_use_casts(region: Any, x: torch.Tensor, w: torch.Tensor):
    with region("cpu", dtype=BF16, cache_enabled=False):
        outs = [torch.mm(x, w) for _ in range(3)]
    assert cast_nodes(w, *outs) == 3


def test_cache_switched_off_inside_does_not_use_or_keep_casts(x: torch.Tensor, w: torch.Tensor):
    with fastamp.autocast("cpu"):
        outs = [torch.mm(x, w)]
        with fastamp.autocast("cpu", cache_enabled=False):
            outs += [torch.mm(x, w), torch.mm(x, w)]
        outs.append(torch.mm(x, w))
    assert cast_nodes(w, *outs) == 3


# -- the five cases in which torch's cache is wrong ------------------------------------------------


@pytest.mark.parametrize("outer", REGIONS)
@pytest.mark.parametrize("inner", REGIONS)
def test_nested_region_of_another_dtype(outer: Any, inner: Any, x: torch.Tensor, w: torch.Tensor):
    with outer("cpu", dtype=BF16):
        first = torch.mm(x, w)
        with inner("cpu", dtype=FP16):
            second = torch.mm(x, w)
        third = torch.mm(x, w)
    assert [first.dtype, second.dtype, third.dtype] == [BF16, FP16, BF16]
    assert torch.equal(second, by_hand(x, w, FP16))
    assert torch.equal(third, first)


EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda w: w.mul_(2),
    "copy_": lambda w: w.copy_(torch.ones(8, 8)),
    "index assignment": lambda w: w.__setitem__(0, 7.0),
    "edit through a view": lambda w: w.t()[1].fill_(3),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "out=": lambda w: torch.add(torch.ones(8, 8), 1, out=w),
    "set_": lambda w: w.set_(torch.ones(8, 8)),
    "detached edit": lambda w: w.detach().mul_(2),
    "data =": lambda w: setattr(w, "data", torch.full((8, 8), 5.0)),
    "torch.nn.init": torch.nn.init.zeros_,
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edited_weight_is_cast_again(region: Any, edit: Any, x: torch.Tensor, w: torch.Tensor):
    with region("cpu", dtype=BF16):
        before = torch.mm(x, w)
        with torch.no_grad():
            edit(w)
        after = torch.mm(x, w)
    assert torch.equal(after, by_hand(x, w))
    assert not torch.equal(after, before)


def test_weight_edited_in_inference_mode_is_cast_again(x: torch.Tensor, w: torch.Tensor):
    with fastamp.autocast("cpu"):
        torch.mm(x, w)
        with torch.inference_mode():
            w.mul_(2)
        assert torch.equal(torch.mm(x, w), by_hand(x, w))


def test_weight_given_other_data_and_then_the_first_again(x: torch.Tensor, w: torch.Tensor):
    first, other = w.data, torch.ones(8, 8)
    with fastamp.autocast("cpu"):
        for data in (first, other, first, other):
            w.data = data
            assert torch.equal(torch.mm(x, w), by_hand(x, w))


def test_weight_whose_storage_was_resized_is_cast_again(x: torch.Tensor, w: torch.Tensor):
    storage = w.untyped_storage()
    size = storage.size()
    with fastamp.autocast("cpu"):
        torch.mm(x, w)
        storage.resize_(0)
        blocker = torch.empty(size, dtype=torch.uint8)
        storage.resize_(size)
        with torch.no_grad():
            w.fill_(3)
        assert torch.equal(torch.mm(x, w), by_hand(x, w))
    assert blocker.numel() == size


@pytest.mark.parametrize("other_region", REGIONS)
@pytest.mark.parametrize("region", REGIONS)
def test_another_thread_leaving_its_region_leaves_our_casts(
    region: Any, other_region: Any, x: torch.Tensor, w: torch.Tensor
):
    other_weight = torch.nn.Parameter(torch.ones(8, 8))

    def other_thread() -> None:
        with other_region("cpu", dtype=BF16):
            torch.mm(x, other_weight)

    with region("cpu", dtype=BF16):
        outs = [torch.mm(x, w)]
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        outs.append(torch.mm(x, w))
    if region is fastamp.autocast:
        assert cast_nodes(w, *outs) == 1
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_first_use_without_grad_does_not_cut_the_weight_off(
    mode: Any, region: Any, x: torch.Tensor, w: torch.Tensor
):
    with region("cpu", dtype=BF16):
        with mode():
            torch.mm(x, w)
        out = torch.mm(x, w)
        out.sum().backward()
        with mode():
            again = torch.mm(x, w)
    assert w.grad is not None
    assert w.grad.abs().sum() > 0
    assert not again.requires_grad


def use_and_fail(x: torch.Tensor, w: torch.Tensor) -> None:
    torch.mm(x, w)
    raise ZeroDivisionError


def test_casts_survive_a_nested_region_left_by_an_exception(x: torch.Tensor, w: torch.Tensor):
    with fastamp.autocast("cpu"):
        outs = [torch.mm(x, w)]
        for region in (fastamp.autocast("cpu"), torch.autocast("cpu", dtype=FP16)):
            with pytest.raises(ZeroDivisionError), region:
                use_and_fail(x, w)
        outs.append(torch.mm(x, w))
    assert cast_nodes(w, *outs) == 1
    outs[-1].sum().backward()


@pytest.mark.parametrize("region", REGIONS)
def test_an_exception_ends_the_life_of_the_casts(region: Any, x: torch.Tensor, w: torch.Tensor):
    with pytest.raises(ZeroDivisionError), region("cpu", dtype=BF16):
        use_and_fail(x, w)
    # `.data` edits do not bump the version: only a new cast sees this one.
    w.data.mul_(2)
    with region("cpu", dtype=BF16):
        assert torch.equal(torch.mm(x, w), by_hand(x, w))


REGION_PAIRS = [(a, b) for a in REGIONS for b in REGIONS]


@pytest.mark.parametrize(("first", "second"), REGION_PAIRS)
@pytest.mark.parametrize("left_first", [0, 1])
def test_casts_die_with_the_outermost_region_in_whatever_order_regions_are_left(
    first: Any, second: Any, left_first: int, x: torch.Tensor, w: torch.Tensor
):
    before = torch_state()
    regions = [first("cpu", dtype=BF16), second("cpu", dtype=BF16)]
    for region in regions:
        region.__enter__()
    torch.mm(x, w)
    for index in (left_first, 1 - left_first):
        regions[index].__exit__(None, None, None)
    set_torch_state(before)
    for region in (torch.autocast, fastamp.autocast, torch.autocast):
        w.data.mul_(2)
        with region("cpu", dtype=BF16):
            assert torch.equal(torch.mm(x, w), by_hand(x, w))


def test_casts_made_with_the_state_set_by_hand_do_not_outlive_it(x: torch.Tensor, w: torch.Tensor):
    """The way C++ programs and old code use autocast, without and with nesting."""
    for nested in (False, True, False):
        with ExitStack() as undo:
            torch.set_autocast_enabled("cpu", True)
            undo.callback(torch.set_autocast_enabled, "cpu", False)
            if nested:
                torch.autocast_increment_nesting()
                undo.callback(early_bound_clear)
                undo.callback(torch.autocast_decrement_nesting)
            assert torch.equal(torch.mm(x, w), by_hand(x, w))
        w.data.mul_(2)


@pytest.mark.parametrize("clear", [early_bound_clear, lambda: torch.clear_autocast_cache()])
@pytest.mark.parametrize("region", REGIONS)
def test_clear_autocast_cache_drops_casts(
    region: Any, clear: Any, x: torch.Tensor, w: torch.Tensor
):
    with region("cpu", dtype=BF16):
        outs = [torch.mm(x, w)]
        clear()
        outs.append(torch.mm(x, w))
    assert cast_nodes(w, *outs) == 2
