# SPDX-License-Identifier: Apache-2.0
"""Weights cast together, to 16 bits and fp8: all at the first use, right whatever happened."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
from support.autocast_state import torch_kernels
from support.float8 import float8_region
from support.small_models import MODELS, train_step

BF16 = torch.bfloat16


def bf16_region(region_class: Any = fastamp.autocast, **options: Any) -> Any:
    return region_class("cpu", dtype=BF16, **options)


def linear_in_bf16(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, layer.weight.detach().to(BF16), layer.bias.detach().to(BF16))


def linear_in_float8(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What a region gives that casts one by one."""
    with float8_region():
        return layer(x)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What weights are cast to.

    Attributes:
        region: Opens a region that casts so.
        x: An input of the first layer; the second has as many features.
        out: Features that come out of the second.
        casts: Number of casts for each layer.
        linear: What a layer has to give.
    """

    region: Callable[..., Any]
    x: torch.Tensor
    out: int
    casts: int
    linear: Callable[[nn.Linear, torch.Tensor], torch.Tensor]

    def model(self) -> Two:
        return Two(self.x.shape[1], self.out)

    def count(self, model: Two, **options: Any) -> list[int]:
        """Casts made by the first and by the second layer in a region of their own."""
        hidden: list[torch.Tensor] = []
        with self.region(**options):
            first = made(lambda: hidden.append(model.first(self.x)))
            return [first, made(lambda: model.second(hidden[0]))]

    def is_counted(self, model: Two, first: int, second: int, **options: Any) -> bool:
        """Whether the layers are cast as often, in layers."""
        return self.count(model, **options) == [first * self.casts, second * self.casts]


class Two(nn.Module):
    """Two layers that are used one by one."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(features, features), nn.Linear(features, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def made(run: Callable[[], Any]) -> int:
    """Casts of weights that ``run`` makes."""
    with fastamp.debug.trace() as t:
        run()
    return t.totals["weight_casts"]


SIXTEEN_BITS = Kind(bf16_region, torch.ones(2, 4, dtype=BF16), 4, 2, linear_in_bf16)
KINDS = {
    "bfloat16": SIXTEEN_BITS,
    "fp8": Kind(
        float8_region, torch.linspace(-2, 3, 16 * 32).view(16, 32), 48, 1, linear_in_float8
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def check_first_uses(kind: Kind, **options: Any) -> None:
    model = kind.model()
    with fastamp.casts.together(model):
        assert kind.is_counted(model, 1, 1, **options)
        assert kind.is_counted(model, 2, 0, **options)
        assert kind.is_counted(model, 2, 0, **options)
    assert kind.is_counted(model, 1, 1, **options)


def test_the_first_use_casts_what_the_last_region_used(kind):
    check_first_uses(kind)


def test_the_first_use_in_torchs_regions_does_so_too():
    check_first_uses(SIXTEEN_BITS, region_class=torch.autocast)


def test_what_was_not_used_falls_out_and_what_is_new_comes_in(kind):
    model = kind.model()
    with fastamp.casts.together(model):
        with kind.region():
            model.first(kind.x)
        assert kind.is_counted(model, 1, 1)
        assert kind.is_counted(model, 2, 0)
        with kind.region():
            assert made(lambda: model.first(kind.x)) == 2 * kind.casts
        assert kind.is_counted(model, 1, 1)


def test_regions_that_begin_otherwise_have_plans_of_their_own(kind):
    one, other = kind.model(), kind.model()
    with fastamp.casts.together(one), fastamp.casts.together(other):
        for _ in range(2):
            for model in (one, other):
                result = kind.count(model)
        assert result == [2 * kind.casts, 0]
        assert kind.is_counted(one, 2, 0)


def test_only_what_was_asked_for_joins():
    model = SIXTEEN_BITS.model()
    with fastamp.casts.together([model.first.weight, model.second.weight]):
        SIXTEEN_BITS.count(model)
        assert SIXTEEN_BITS.count(model) == [3, 1]


def move(model: Two) -> None:
    model.second.weight.data = model.second.weight.data.clone() * 3


def edit(model: Two) -> None:
    with torch.no_grad():
        model.second.weight.mul_(3)


def freeze(model: Two) -> None:
    model.second.requires_grad_(False)


def replace(model: Two) -> None:
    model.second.weight = nn.Parameter(model.second.weight.detach() * 3)
    gc.collect()


def resize(model: Two) -> None:
    values = model.second.weight.detach().clone()
    storage = model.second.weight.untyped_storage()
    storage.resize_(0)
    storage.resize_(values.nbytes * 100)
    model.second.weight.data.copy_(values)


def shrink(model: Two) -> None:
    model.second.weight.data = model.second.weight.data[:16, :16].clone()
    model.second.bias.data = model.second.bias.data[:16].clone()


def to_bfloat16(model: Two) -> None:
    model.second.to(BF16)


def to_transposed(model: Two) -> None:
    model.second.weight.data = model.second.weight.data.t().contiguous().t()


def delete(model: Two) -> None:
    model.second = nn.Linear(model.second.in_features, 16)
    gc.collect()


CHANGES = [move, edit, freeze, replace, resize, shrink, to_bfloat16, to_transposed, delete]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("regions", [1, 2])
def test_whatever_happened_between_the_regions_values_are_right(kind, change, regions):
    model = kind.model()
    with fastamp.casts.together(model):
        for _ in range(regions):
            kind.count(model)
        change(model)
        x = kind.x[:, : model.second.weight.shape[1]]
        results = []
        for _ in range(2):
            with kind.region():
                model.first(kind.x)
                results.append(model.second(x))
    assert all(torch.equal(got, kind.linear(model.second, x)) for got in results)


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


def test_a_first_use_without_grad_cuts_no_weight_off(kind):
    model = kind.model()
    with fastamp.casts.together(model):
        kind.count(model)
        with kind.region():
            with torch.no_grad():
                model.first(kind.x)
            out = model(kind.x)
        out.float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_arrive_in_the_order_without_it(kind):
    orders = []
    for together in (False, True):
        model, order = kind.model(), []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name, order=order: order.append(name)
            )
        with fastamp.casts.together(model) if together else nullcontext():
            for _ in range(2):  # The second region casts together.
                with kind.region():
                    out = model(kind.x)
                out.float().sum().backward()
        orders.append(order)
    assert orders[0] == orders[1]


def test_nothing_is_cast_together_with_the_cache_switched_off(kind):
    model = kind.model()
    with fastamp.casts.together(model):
        kind.count(model)
        assert kind.is_counted(model, 1, 1, cache_enabled=False)


@pytest.mark.parametrize("regions", [1, 2])
def test_plans_keep_no_weight_alive(kind, regions):
    model = kind.model()
    memory = model.second.weight.untyped_storage()._weak_ref()
    with fastamp.casts.together(model):
        for _ in range(regions):
            kind.count(model)
        del model
        gc.collect()
        assert torch.UntypedStorage._expired(memory)
        torch.UntypedStorage._free_weak_ref(memory)


def test_threads_have_plans_of_their_own(kind):
    model = kind.model()
    results = []

    def work() -> None:
        for _ in range(50):
            with kind.region():
                results.append(model(kind.x).sum().item())

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
    model = SIXTEEN_BITS.model()
    model.second._hf_hook = object()
    with fastamp.casts.together(model):
        SIXTEEN_BITS.count(model)
        assert SIXTEEN_BITS.is_counted(model, 1, 1)


@pytest.mark.parametrize("wrong", [None, 3, "model", [1]])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(TypeError, match=r"casts.together: expected a module, a tensor or tensors"):
        fastamp.casts.together(wrong)


def test_release_may_be_called_again():
    asked = fastamp.casts.together(SIXTEEN_BITS.model())
    asked.release()
    asked.release()
