# SPDX-License-Identifier: Apache-2.0
"""Weights cast together: all at the first use, right whatever happened to them, torch's bits."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
from support.autocast_state import torch_kernels
from support.small_models import MODELS, train_step

BF16 = torch.bfloat16


class Two(nn.Module):
    """Two layers that are used one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


X = torch.ones(2, 4, dtype=BF16)


def made(run: Any) -> int:
    """Casts of weights that ``run`` makes."""
    with fastamp.debug.trace() as t:
        run()
    return t.totals["weight_casts"]


def region(model: Two, region_class: Any = fastamp.autocast) -> list[int]:
    """Casts made by the first and by the second layer in a region of their own."""
    with region_class("cpu", dtype=BF16):
        return [made(lambda: model.first(X)), made(lambda: model.second(X))]


@pytest.mark.parametrize("region_class", [fastamp.autocast, torch.autocast])
def test_the_first_use_casts_what_the_last_region_used(region_class):
    model = Two()
    with fastamp.casts.together(model):
        assert region(model, region_class) == [2, 2]
        assert region(model, region_class) == [4, 0]
        assert region(model, region_class) == [4, 0]
    assert region(model, region_class) == [2, 2]


def test_what_was_not_used_falls_out_and_what_is_new_comes_in():
    model = Two()
    with fastamp.casts.together(model):
        with fastamp.autocast("cpu"):
            model.first(X)
        assert region(model) == [2, 2]
        assert region(model) == [4, 0]
        with fastamp.autocast("cpu"):
            assert made(lambda: model.first(X)) == 4
        assert region(model) == [2, 2]


def test_regions_that_begin_otherwise_have_plans_of_their_own():
    one, other = Two(), Two()
    with fastamp.casts.together(one), fastamp.casts.together(other):
        for _ in range(2):
            for model in (one, other):
                result = region(model)
        assert result == [4, 0]
        assert region(one) == [4, 0]


def test_only_what_was_asked_for_joins():
    model = Two()
    with fastamp.casts.together([model.first.weight, model.second.weight]):
        region(model)
        assert region(model) == [3, 1]


def move(model: Two) -> None:
    model.second.weight.data = model.second.weight.data.clone() * 2


def edit(model: Two) -> None:
    with torch.no_grad():
        model.second.weight.mul_(2)


def freeze(model: Two) -> None:
    model.second.requires_grad_(False)


def replace(model: Two) -> None:
    model.second.weight = nn.Parameter(model.second.weight.detach() * 2)
    gc.collect()


def resize(model: Two) -> None:
    values = model.second.weight.detach().clone()
    storage = model.second.weight.untyped_storage()
    storage.resize_(0)
    storage.resize_(values.nbytes * 100)
    model.second.weight.data.copy_(values)


def delete(model: Two) -> None:
    model.second = nn.Linear(4, 4)
    gc.collect()


@pytest.mark.parametrize("change", [move, edit, freeze, replace, resize, delete])
def test_whatever_happened_between_the_regions_values_are_right(change):
    model = Two()
    with fastamp.casts.together(model):
        region(model)
        change(model)
        for _ in range(2):
            with fastamp.autocast("cpu"):
                model.first(X)
                got = model.second(X)
            weight, bias = model.second.weight.detach(), model.second.bias.detach()
            expected = nn.functional.linear(X, weight.to(BF16), bias.to(BF16))
            assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["mlp", "cnn", "separate qkv", "fused qkv, checkpoint", "tied"])
def test_training_has_torchs_bits(name: str):
    def steps(region_class: Any, together: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = MODELS[name]()
        asked = fastamp.casts.together(model if together else [])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(5, 6, 8, generator=generator), torch.arange(5) % 4
        seen: list[torch.Tensor] = []
        for _ in range(3):
            seen += train_step(model, region_class("cpu", dtype=BF16), x, y)
            optimizer.step()
        asked.release()
        return seen

    own = steps(fastamp.autocast, together=True)
    with torch_kernels():
        torchs = steps(torch.autocast, together=False)
    assert all(torch.equal(a, b) for a, b in zip(own, torchs, strict=True))


def test_a_first_use_without_grad_cuts_no_weight_off():
    model = Two()
    with fastamp.casts.together(model):
        region(model)
        with fastamp.autocast("cpu"):
            with torch.no_grad():
                model.first(X)
            out = model.second(model.first(X))
        out.float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_nothing_is_cast_together_with_the_cache_switched_off():
    model = Two()
    with fastamp.casts.together(model):
        region(model)
        with fastamp.autocast("cpu", cache_enabled=False):
            assert made(lambda: model.first(X)) == 2


def test_plans_keep_no_weight_alive():
    model = Two()
    memory = model.second.weight.untyped_storage()._weak_ref()
    with fastamp.casts.together(model):
        region(model)
        del model
        gc.collect()
        assert torch.UntypedStorage._expired(memory)
        torch.UntypedStorage._free_weak_ref(memory)


def test_threads_have_plans_of_their_own():
    model = Two()
    results = []

    def work() -> None:
        for _ in range(50):
            with fastamp.autocast("cpu"):
                results.append(model.second(model.first(X)).sum().item())

    work()
    with fastamp.casts.together(model):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 200
    assert len(set(results)) == 1


def test_modules_whose_weights_come_and_go_are_left_out():
    model = Two()
    model.second._hf_hook = object()
    with fastamp.casts.together(model):
        region(model)
        assert region(model) == [2, 2]


@pytest.mark.parametrize("wrong", [None, 3, "model", [1]])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(TypeError, match=r"casts.together: expected a module, a tensor or tensors"):
        fastamp.casts.together(wrong)


def test_release_may_be_called_again():
    asked = fastamp.casts.together(Two())
    asked.release()
    asked.release()
