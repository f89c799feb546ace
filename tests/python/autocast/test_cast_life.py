# SPDX-License-Identifier: Apache-2.0
"""What the cast cache keeps alive, and which tensors it must not treat as weights."""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import fastamp
from support.autocast_state import torch_kernels
from support.casts import cast_nodes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REGIONS = [fastamp.autocast, torch.autocast]


def make_weight(size: int = 8) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(size, size, generator=torch.Generator().manual_seed(1)))


def by_hand(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.mm(x.to(dtype), w.detach().to(dtype))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_requires_grad_switched_off_and_on_inside_a_region(x: torch.Tensor):
    w = make_weight()
    with fastamp.autocast("cpu"):
        first = torch.mm(x, w)
        w.requires_grad_(False)
        frozen = torch.mm(x, w)
        w.requires_grad_(True)
        second = torch.mm(x, w)
    assert first.requires_grad
    assert not frozen.requires_grad
    second.sum().backward()
    assert w.grad is not None


def test_requires_grad_switched_on_after_the_first_use(x: torch.Tensor):
    w = torch.randn(8, 8)
    with fastamp.autocast("cpu"):
        torch.mm(x, w)
        w.requires_grad_(True)
        torch.mm(x, w).sum().backward()
    assert w.grad is not None


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize(
    "op",
    [
        torch.chain_matmul,
        lambda w: torch.einsum("ij->ij", w),
        lambda w: torch.einsum("ij->ji", w),
        lambda w: torch.matmul(w, torch.eye(8)),
        lambda w: torch.nn.functional.linear(w, torch.eye(8)),
    ],
    ids=["chain_matmul", "einsum", "einsum transposed", "matmul", "linear"],
)
def test_editing_what_an_op_returned_corrupts_no_kept_cast(op: Any, region: Any, x: torch.Tensor):
    w = make_weight()
    with region("cpu", dtype=BF16), torch.no_grad():
        torch.mm(x, w)
        op(w).zero_()
        assert torch.equal(torch.mm(x, w), by_hand(x, w))


def test_cast_edited_through_what_an_op_returned_is_not_used_again(x: torch.Tensor):
    fastamp.policies.set("einsum", "lower", "cpu")
    fastamp.policies.set("chain_matmul", "lower", "cpu")
    try:
        for op in (lambda w: torch.einsum("ij->ij", w), torch.chain_matmul):
            w = make_weight()
            with fastamp.autocast("cpu"), torch.no_grad():
                handed_out = op(w)
                assert handed_out.dtype == BF16
                handed_out.zero_()
                assert torch.equal(torch.mm(x, w), by_hand(x, w))
    finally:
        fastamp.policies.reset()


def test_backward_notices_an_edit_of_what_another_op_saved(x: torch.Tensor):
    w = make_weight()
    activation = x.requires_grad_() * 1
    with fastamp.autocast("cpu"):
        first, second = torch.mm(activation, w), torch.mm(activation, w)
    saved = first.grad_fn._saved_self  # type: ignore[union-attr]
    assert saved.data_ptr() == second.grad_fn._saved_self.data_ptr()  # type: ignore[union-attr]
    with torch.no_grad():
        saved.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.sum().backward()


@pytest.mark.parametrize("region", REGIONS)
def test_nothing_is_kept_alive_after_the_region(region: Any, x: torch.Tensor):
    w = make_weight()
    with region("cpu", dtype=BF16):
        out = torch.mm(x.requires_grad_(), w)
        cast = out.grad_fn._saved_mat2
        assert cast.dtype == BF16
        alive = weakref.ref(cast)
        del out, cast
        gc.collect()
        assert alive() is not None
    gc.collect()
    assert alive() is None


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("region", REGIONS)
def test_memory_of_casts_is_given_back_when_the_region_ends(region: Any):
    size = 2048
    w = make_weight(size)
    row = torch.randn(1, size)
    with region("cpu", dtype=BF16):
        torch.mm(row, w)

    def growth() -> int:
        gc.collect()
        before = resident_bytes()
        for _ in range(30):
            with region("cpu", dtype=BF16):
                torch.mm(row, w)
        gc.collect()
        return resident_bytes() - before

    # What is kept for each region grows each time; what the process grows by for itself does not.
    assert min(growth() for _ in range(3)) < 4 * size * size


def fresh_leaf(size: int = 1024) -> torch.Tensor:
    return torch.randn(size, size, requires_grad=True)


def with_saliency() -> None:
    leaf = fresh_leaf()
    torch.mm(torch.ones(1, 1024), leaf).sum().backward()
    assert leaf.grad is not None


def with_a_dropped_model() -> None:
    torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1))(torch.ones(1, 1024))


def with_kept_casts() -> None:
    model = torch.nn.Linear(1024, 1024)
    fastamp.casts.keep(model)
    model(torch.ones(1, 1024))


def without_gradients(leaf: torch.Tensor) -> None:
    with torch.no_grad():
        torch.mm(torch.ones(1, 1024), leaf)


def in_inference_mode() -> None:
    leaf = fresh_leaf()
    with torch.inference_mode():
        torch.mm(torch.ones(1, 1024), leaf)


def inside_a_transform() -> None:
    data = fresh_leaf().detach()
    torch.func.grad(lambda leaf: torch.mm(torch.ones(1, 1024), leaf).sum())(data)


def in_fp8() -> None:
    with fastamp.autocast("cpu", float8=True):
        torch.mm(torch.ones(16, 1024), fresh_leaf())


ENDLESS: dict[str, Callable[[], Any]] = {
    "view of a leaf": lambda: torch.mm(torch.ones(1, 1024), fresh_leaf().t()),
    "leaf": lambda: torch.mm(torch.ones(1, 1024), fresh_leaf()),
    "saliency": with_saliency,
    "dropped model": with_a_dropped_model,
    "kept casts of a dropped model": with_kept_casts,
    "leaf, no_grad": lambda: without_gradients(fresh_leaf()),
    "view, no_grad": lambda: without_gradients(fresh_leaf().t()),
    "leaf, inference mode": in_inference_mode,
    "leaf of a transform": inside_a_transform,
    "leaf, fp8": in_fp8,
}


@pytest.mark.parametrize("kept", [0, 100], ids=["alone", "beside a model"])
@pytest.mark.parametrize("use", ENDLESS.values(), ids=ENDLESS)
def test_casts_of_dead_tensors_do_not_add_up_in_a_long_region(use: Callable[[], Any], kept: int):
    model = [make_weight() for _ in range(kept)]
    with fastamp.autocast("cpu", dtype=BF16):
        outs = [torch.mm(torch.ones(4, 8), w) for w in model]
        for _ in range(4):
            use()
        before = resident_bytes()
        for _ in range(40):
            use()
        growth = resident_bytes() - before
        again = [torch.mm(torch.ones(4, 8), w) for w in model]
    assert growth < 30_000_000  # a cast has 2 MB, a leaf 4
    # Those of living tensors stay.
    assert all(cast_nodes(w, a, b) == 1 for w, a, b in zip(model, outs, again, strict=True))


@pytest.mark.parametrize("region", REGIONS)
def test_a_weight_deleted_inside_the_region_is_freed(region: Any, x: torch.Tensor):
    w = make_weight()
    alive = weakref.ref(w)
    storage = weakref.ref(w.untyped_storage())
    with region("cpu", dtype=BF16), torch.no_grad():
        torch.mm(x, w)
        del w
        gc.collect()
        assert alive() is None
        assert storage() is None
        for _ in range(200):  # new weights where the old one lay must not meet its cast
            fresh = torch.nn.Parameter(torch.randn(8, 8))
            assert torch.equal(torch.mm(x, fresh), by_hand(x, fresh))
            del fresh


def test_many_regions_do_not_grow_memory():
    region = fastamp.autocast("cpu", dtype=FP16)
    for _ in range(10_000):
        with region, fastamp.autocast("cpu", dtype=BF16):
            pass
    before = resident_bytes()
    for _ in range(300_000):
        with region, fastamp.autocast("cpu", dtype=BF16):
            pass
    assert resident_bytes() - before < 8_000_000


def test_regions_made_with_failing_arguments_do_not_grow_memory():
    def attempt() -> None:
        with pytest.raises(TypeError):
            fastamp.autocast("cpu", nonsense=1)

    for _ in range(1000):
        attempt()
    before = resident_bytes()
    for _ in range(20_000):
        attempt()
    assert resident_bytes() - before < 8_000_000


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.5), id="SGD"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.5, foreach=True), id="SGD foreach"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.5, foreach=True), id="AdamW foreach"),
    ],
)
def test_optimizer_step_inside_a_region_is_seen_by_the_next_forward(
    make: Any, region: Any, x: torch.Tensor
):
    w = make_weight()
    optimizer = make([w])
    with region("cpu", dtype=BF16):
        for _ in range(3):
            torch.mm(x, w).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                assert torch.equal(torch.mm(x, w), by_hand(x, w))


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("kernels", [torch_kernels, nullcontext])
def test_torchs_fused_step_inside_a_region_is_seen_and_not_by_torchs_kernels(
    kernels: Any, optimizer_class: Any, x: torch.Tensor
):
    """It moves no version counter; docs/compatibility.md says so."""
    w = make_weight()
    optimizer = optimizer_class([w], lr=0.5, fused=True)
    with kernels(), fastamp.autocast("cpu", dtype=BF16):
        out = torch.mm(x, w)
        out.sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(torch.mm(x, w), out) == (kernels is torch_kernels)
            torch.clear_autocast_cache()
            assert torch.equal(torch.mm(x, w), by_hand(x, w))


def test_tied_weights_share_one_cast(x: torch.Tensor):
    first = torch.nn.Linear(8, 8, bias=False)
    second = torch.nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    with fastamp.autocast("cpu"):
        out = second(first(x))
    assert cast_nodes(first.weight, out) == 1
    out.float().sum().backward()
    assert first.weight.grad is not None


def test_views_of_weights_lead_to_the_weight(x: torch.Tensor):
    w = make_weight()
    with fastamp.autocast("cpu"):
        outs = [torch.mm(x, w.t()), torch.mm(x, w.t()), torch.mm(x, w)]
    assert torch.equal(outs[0], by_hand(x, w.t()))
    sum(out.sum() for out in outs).backward()
    assert w.grad is not None


def test_a_view_kept_from_before_the_edit_shows_the_edit(x: torch.Tensor):
    w = make_weight()
    with torch.no_grad():
        view = w.view(8, 8)
    with fastamp.autocast("cpu"), torch.no_grad():
        torch.mm(x, view)
        w.mul_(3)
        assert torch.equal(torch.mm(x, view), by_hand(x, view))


def test_half_precision_weights(x: torch.Tensor):
    w = torch.nn.Parameter(make_weight().detach().to(FP16))
    with fastamp.autocast("cpu", dtype=FP16):
        same = torch.mm(x, w)
    with fastamp.autocast("cpu", dtype=BF16):
        other = torch.mm(x, w)
        with torch.no_grad():
            w.mul_(2)
        edited = torch.mm(x, w)
    assert same.dtype == FP16
    assert torch.equal(other, by_hand(x, w / 2))
    assert torch.equal(edited, by_hand(x, w))


def test_double_integer_and_complex_arguments_are_never_cast():
    with fastamp.autocast("cpu"):
        for dtype in (torch.float64, torch.complex64, torch.int64):
            a = torch.ones(4, 4, dtype=dtype)
            assert torch.mm(a, a).dtype == dtype


def test_no_weak_reference_to_a_weight_stays_after_the_region(x: torch.Tensor):
    """torch.utils.swap_tensors refuses tensors that have weak references."""
    a, b = make_weight(), torch.nn.Parameter(torch.ones(8, 8))
    with fastamp.autocast("cpu"), torch.no_grad():
        torch.mm(x, a), torch.mm(x, b)
    torch.utils.swap_tensors(a, b)
    with fastamp.autocast("cpu"), torch.no_grad():
        assert torch.equal(torch.mm(x, a), by_hand(x, torch.ones(8, 8)))
