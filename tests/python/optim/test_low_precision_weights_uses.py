# SPDX-License-Identifier: Apache-2.0
"""Gradients of low-precision weights are torch.amp's however often, and where, a weight is used."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastamp

BF16 = torch.bfloat16


class Views(nn.Module):
    """A weight that is used through views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight.t()) @ self.weight.t()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


class Shared(nn.Module):
    """A block in several places of one pass."""

    def __init__(self, *, recompute: bool | None = None) -> None:
        super().__init__()
        self.block, self.recompute = mlp(), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            if self.recompute is None:
                x = self.block(x)
            else:
                x = checkpoint(self.block, x, use_reentrant=self.recompute)
        return x


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x[:, None])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "views": Views,
    "shared": Shared,
    "checkpointed": lambda: Shared(recompute=False),
    "reentrant": lambda: Shared(recompute=True),
    "conv": Convolutions,
}


def region(**options: Any) -> Any:
    return torch.autocast("cpu", dtype=BF16, **options)


def inputs(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 64, generator=generator, requires_grad=True) for _ in range(count)]


def loss_of(*outputs: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for i, output in enumerate(outputs):
        total = total + (output.float() - i).square().mean()
    return total


def once(model: nn.Module) -> None:
    with region():
        out = model(inputs(1)[0])
    loss_of(out).backward()


def twice_in_one_region(model: nn.Module) -> None:
    with region():
        outs = [model(x) for x in inputs(2)]
    loss_of(*outs).backward()


def twice_in_two_regions(model: nn.Module) -> None:
    outs = []
    for x in inputs(2):
        with region():
            outs.append(model(x))
    loss_of(*outs).backward()


def three_times_and_twice(model: nn.Module) -> None:
    outs = []
    for count in (3, 2):
        with region():
            outs += [model(x) for x in inputs(count)]
    loss_of(*outs).backward()


def accumulated(model: nn.Module) -> None:
    for x in inputs(3):
        with region():
            outs = model(x), model(x)
        loss_of(*outs).backward()


def reference_without_gradients(model: nn.Module) -> None:
    """As in DPO: one pass without grad mode, in the same region."""
    with region():
        with torch.no_grad():
            reference = model(inputs(2)[1])
        outs = [model(x) for x in inputs(2)]
    loss_of(*outs, outs[0].float() - reference.float()).backward()


def in_parts(model: nn.Module) -> None:
    """Two backward passes through one region."""
    with region():
        outs = [model(x) for x in inputs(2)]
    loss_of(outs[0]).backward(retain_graph=True)
    loss_of(outs[1]).backward()


def without_cache(model: nn.Module) -> None:
    with region(cache_enabled=False):
        outs = [model(x) for x in inputs(2)]
    loss_of(*outs).backward()


def backward_inside(model: nn.Module) -> None:
    """Forward and backward passes of one region."""
    with region():
        for x in inputs(2):
            loss_of(model(x), model(x)).backward()


def by_grad(model: nn.Module) -> None:
    """A penalty on gradients of the inputs, as of a GAN."""
    x = inputs(1)[0]
    with region():
        (slope,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
        out = model(x)
    (loss_of(out) + slope.square().mean()).backward()


USES = (
    once,
    twice_in_one_region,
    twice_in_two_regions,
    three_times_and_twice,
    accumulated,
    reference_without_gradients,
    in_parts,
    without_cache,
    backward_inside,
)


def twins(name: str, *, example: bool, dtype: torch.dtype = BF16) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = MODELS[name]()
    model = copy.deepcopy(plain)
    shown = inputs(1)[0].detach() if example or name == "views" else None
    handle = fastamp.optim.low_precision_weights_(model, dtype, example_inputs=shown, verbose=False)
    assert handle.conversion.converted
    return plain, model


def check_gradients(plain: nn.Module, model: nn.Module) -> None:
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert other.grad.dtype == torch.float32
        torch.testing.assert_close(
            other.grad, one.grad, rtol=0, atol=0, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_float32_weights(
    name: str, use: Callable[[nn.Module], None], *, example: bool
) -> None:
    if name == "reentrant" and use is in_parts:
        pytest.skip("torch frees what a reentrant pass has saved")
    plain, model = twins(name, example=example)
    for each in (plain, model):
        use(each)
    check_gradients(plain, model)


def test_penalties_on_gradients_have_torchs_bits() -> None:
    plain, model = twins("mlp", example=False)
    for each in (plain, model):
        by_grad(each)
    check_gradients(plain, model)


def test_uses_outside_of_regions_give_float32_gradients() -> None:
    _, model = twins("mlp", example=False)
    weight = model[0].weight
    with region():
        out = model(inputs(1)[0])
    penalty = weight.square().sum() + (weight.t() * 2).sum()
    (loss_of(out) + penalty.float()).backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    model(inputs(1)[0].to(BF16)).sum().backward()
    assert weight.grad.dtype == torch.float32


def test_gradients_of_another_dtype_may_be_given_by_hand() -> None:
    _, model = twins("mlp", example=False)
    once(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def test_16_bit_weights_without_masters_have_torchs_gradients() -> None:
    _, lowered = twins("mlp", example=False)
    weights = [p.detach().clone().requires_grad_() for p in lowered[0].parameters()]
    for weight in weights:
        weight.grad_dtype = torch.float32
    found = []
    for registered in (True, False):
        for weight in weights:
            weight.grad = None
        x = inputs(1)[0].detach().to(BF16)
        with contextlib.ExitStack() as stack:
            if registered:
                stack.enter_context(region())
            y = nn.functional.linear(nn.functional.linear(x, *weights), *weights)
        loss_of(y).backward()
        found.append([w.grad for w in weights])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_edits_of_a_weight_between_uses_count() -> None:
    _, model = twins("mlp", example=False)
    x = inputs(1)[0].detach()
    with region():
        first = model(x)
        with torch.no_grad():
            model[0].weight.zero_()
        second = model(x)
    assert not torch.equal(first, second)
