# SPDX-License-Identifier: Apache-2.0
"""Casts that last: used while the weight is as it was, never after, and with torch's gradients."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fastamp
from support.autocast_state import torch_kernels
from support.kept_casts import casts_of, use

pytestmark = pytest.mark.usefixtures("nothing_is_kept_afterwards")
BF16 = torch.bfloat16


@pytest.fixture
def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_weight_is_cast_once_for_all_regions(weight, requires_grad, context):
    weight.requires_grad_(requires_grad)
    with fastamp.casts.keep(weight), context():
        assert casts_of(lambda: use(weight)) == (1, 0)
        assert casts_of(lambda: [use(weight) for _ in range(3)]) == (0, 3)
        assert fastamp.casts.kept() == (1, 12)
    assert casts_of(lambda: use(weight)) == (1, 0)


def test_within_a_region_the_regions_own_cache_serves(weight):
    def twice() -> None:
        with fastamp.autocast("cpu"):
            for _ in range(2):
                torch.mm(torch.ones(1, 3, dtype=BF16), weight)

    for requires_grad in (True, False):
        weight.requires_grad_(requires_grad)
        with fastamp.casts.keep(weight), fastamp.debug.trace() as t:
            twice()
            twice()
        totals = t.totals
        assert (totals["weight_casts"] + totals["other_casts"], totals["kept_hits"]) == (1, 1)
        assert totals["cache_hits"] == 2


def test_nothing_is_kept_without_being_asked_for(weight):
    other = torch.nn.Parameter(torch.ones(3, 2))
    with fastamp.casts.keep(other):
        assert casts_of(lambda: [use(weight), use(weight)]) == (2, 0)


def edit_in_place(w):
    with torch.no_grad():
        w.mul_(2)


def edit_detached(w):
    w.detach().mul_(2)


def edit_slice(w):
    with torch.no_grad():
        w[0] = 7


def assign_data(w):
    w.data = w.data * 2


def assign_data_of_another_shape(w):
    w.data = torch.ones(3, 5)


def assign_a_transposed_view(w):
    w.data = w.data.view(2, 3)


def fill(w):
    torch.nn.init.ones_(w)


def resize_the_storage(w):
    values = w.detach().clone() + 1
    w.untyped_storage().resize_(0)
    w.untyped_storage().resize_(values.nbytes * 64)
    w.data.copy_(values)


@pytest.mark.parametrize(
    "edit",
    [
        edit_in_place,
        edit_detached,
        edit_slice,
        assign_data,
        assign_data_of_another_shape,
        assign_a_transposed_view,
        fill,
        resize_the_storage,
    ],
)
def test_an_edited_weight_is_cast_again(weight, edit):
    with fastamp.casts.keep(weight):
        use(weight)
        edit(weight)
        assert torch.equal(use(weight), weight.detach().to(BF16).sum(0, keepdim=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.5),
        lambda p: torch.optim.SGD(p, lr=0.5, foreach=False),
        lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.5, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.5, fused=True),
        lambda p: torch.optim.LBFGS(p, lr=0.5),
    ],
)
def test_after_an_optimizer_step_the_weight_is_cast_again(weight, make):
    optimizer = make([weight])
    with fastamp.casts.keep(weight):
        use(weight)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = use(weight).float().square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            closure()
            optimizer.step(closure)
            assert torch.equal(use(weight), weight.detach().to(BF16).sum(0, keepdim=True))


def test_a_skipped_step_leaves_the_copy(weight):
    scaler = fastamp.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with fastamp.casts.keep(weight):
        use(weight)
        scaler.scale(torch.ones(()))
        weight.grad = torch.full_like(weight, torch.inf)
        scaler.step(optimizer)
        assert casts_of(lambda: use(weight)) == (0, 1)


def test_the_documented_danger_and_the_way_out(weight):
    with fastamp.casts.keep(weight):
        before = use(weight)
        weight.data.mul_(2)
        assert torch.equal(use(weight), before)
        fastamp.casts.drop()
        assert torch.equal(use(weight), 2 * before)
        weight.data.mul_(2)
        fastamp.casts.drop(weight)
        assert torch.equal(use(weight), 4 * before)


def test_torch_swaps_a_weight_only_after_release(weight):
    other = torch.nn.Parameter(weight.detach() * 3)
    keeper = fastamp.casts.keep(weight)
    with pytest.raises(RuntimeError, match="no weakrefs"):
        torch.utils.swap_tensors(weight, other)
    keeper.release()
    torch.utils.swap_tensors(weight, other)
    assert torch.equal(use(weight), weight.detach().to(BF16).sum(0, keepdim=True))


def test_dropping_inside_a_region_acts_at_once(weight):
    with fastamp.casts.keep(weight), fastamp.autocast("cpu"):
        ones = torch.ones(1, 3, dtype=BF16)
        before = torch.mm(ones, weight)
        weight.data.mul_(2)
        fastamp.casts.drop(weight)
        assert torch.equal(torch.mm(ones, weight), 2 * before)


def accumulated_gradients(keep: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    keeper = fastamp.casts.keep(model if keep else [])
    for seed in range(3):
        torch.manual_seed(seed)
        with fastamp.autocast("cpu"):
            loss = model(torch.randn(5, 8)).float().square().mean()
        loss.backward()
    assert fastamp.casts.kept().copies == (4 if keep else 0)
    keeper.release()
    return [p.grad for p in model.parameters()]


def test_gradients_of_several_regions_are_torchs():
    own = accumulated_gradients(keep=True)
    with torch_kernels():
        torchs = accumulated_gradients(keep=False)
    assert all(torch.equal(a, b) for a, b in zip(own, torchs, strict=True))


def test_every_region_has_a_graph_of_its_own(weight):
    with fastamp.casts.keep(weight):
        first, second = use(weight), use(weight)
        first.sum().backward()
        second.sum().backward()  # would throw if it went through the freed graph of the first
    assert torch.equal(weight.grad, torch.full((3, 2), 2.0))


def test_grad_after_no_grad_and_frozen_after_trained(weight):
    with fastamp.casts.keep(weight), fastamp.autocast("cpu"):
        ones = torch.ones(1, 3, dtype=BF16)
        with torch.no_grad():
            assert not torch.mm(ones, weight).requires_grad
        assert torch.mm(ones, weight).requires_grad
        weight.requires_grad_(False)
        assert not torch.mm(ones, weight).requires_grad
        weight.requires_grad_(True)
        assert torch.mm(ones, weight).requires_grad


def test_dtypes_have_copies_of_their_own(weight):
    with fastamp.casts.keep(weight):
        for _ in range(2):
            assert use(weight, BF16).dtype == BF16
            assert use(weight, torch.float16).dtype == torch.float16
        assert fastamp.casts.kept() == (2, 24)


def test_a_cast_that_a_mode_made_another_kind_of_is_not_kept_and_counts_once(weight):
    with fastamp.casts.keep(weight), fastamp.debug.trace() as trace:
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(use(weight), FakeTensor)
        assert fastamp.casts.kept() == (0, 0)
    assert trace.totals["weight_casts"] == 1


def test_a_copy_that_somebody_edited_is_made_again(weight):
    saved = []
    with fastamp.casts.keep(weight):
        before = use(weight)
        x = torch.ones(1, 3, dtype=BF16, requires_grad=True)
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
            fastamp.autocast("cpu"),
        ):
            torch.mm(x, weight)
        (copy_of_weight,) = (t for t in saved if t.dtype == BF16 and t.numel() == 6)
        with torch.no_grad():
            copy_of_weight.zero_()
        assert torch.equal(use(weight), before)
