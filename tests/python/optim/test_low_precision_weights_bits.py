# SPDX-License-Identifier: Apache-2.0
"""Low-precision weights train as float32 weights do in the same regions: losses and masters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
from support.small_models import MODELS

BF16, FP16 = torch.bfloat16, torch.float16
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, fastamp.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    # Its own float32 step is the reference: torch's roots are off by units (docs/optim.md).
    "adamw": (fastamp.optim.AdamW, fastamp.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


def batches(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(5, 6, 8, generator=generator),
            torch.randint(4, (5,), generator=generator),
        )
        for _ in range(count)
    ]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    dtype: torch.dtype,
    *,
    steps: int = 4,
    accumulate: int = 1,
    clip: bool = False,
    seed: int = 0,
) -> list[torch.Tensor]:
    """The losses of each backward pass."""
    losses = []
    for i, (x, target) in enumerate(batches(steps * accumulate, seed)):
        with torch.autocast("cpu", dtype=dtype):
            loss = nn.functional.cross_entropy(model(x), target) / accumulate
        scaler.scale(loss).backward()
        losses.append(loss.detach())
        if (i + 1) % accumulate == 0:
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return losses


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def scaler_of(dtype: torch.dtype) -> fastamp.GradScaler:
    return fastamp.GradScaler("cpu", enabled=dtype == FP16, init_scale=2.0**10)


def twins(
    name: str, optimizer: str, dtype: torch.dtype, **lowering: Any
) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, Any, fastamp.optim.LowPrecisionWeights]:
    torchs, own, options = OPTIMIZERS[optimizer]
    plain, model = seeded(MODELS[name]), seeded(MODELS[name])
    handle = fastamp.optim.low_precision_weights_(
        model,
        dtype,
        example_inputs=batches(1)[0][0],
        verbose=False,
        **lowering,
    )
    assert handle.conversion.converted
    return (
        plain,
        torchs(plain.parameters(), **options),
        model,
        own(model.parameters(), **options),
        handle,
    )


def check_masters(plain: nn.Module, model: nn.Module, optimizer: Any) -> None:
    masters = optimizer.masters()
    for (name, expected), parameter in zip(
        plain.named_parameters(), model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            masters[parameter], expected.detach(), rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
        torch.testing.assert_close(parameter, expected.to(parameter.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_masters_are_those_of_float32_weights(
    name: str, dtype: torch.dtype, optimizer: str
) -> None:
    plain, torchs, model, own, _ = twins(name, optimizer, dtype)
    try:
        expected = train(plain, torchs, scaler_of(dtype), dtype, accumulate=2, clip=True)
    except RuntimeError as error:
        if name == "lstm" and "could not create a primitive" in str(error):
            pytest.skip("torch has no float16 LSTM for this CPU")
        raise
    losses = train(model, own, scaler_of(dtype), dtype, accumulate=2, clip=True)
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    check_masters(plain, model, own)


@pytest.mark.parametrize("name", ["mlp", "cnn", "fused qkv"])
def test_gradients_in_16_bits_are_exact_where_nothing_is_accumulated(name: str) -> None:
    plain, torchs, model, own, _ = twins(name, "adamw", BF16, grads=BF16)
    expected = train(plain, torchs, scaler_of(BF16), BF16)
    losses = train(model, own, scaler_of(BF16), BF16)
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    check_masters(plain, model, own)


def test_gradients_have_the_dtype_asked_for() -> None:
    for grads in (torch.float32, BF16):
        _, _, model, _, _ = twins("mlp", "sgd", BF16, grads=grads)
        x, target = batches(1)[0]
        with torch.autocast("cpu", dtype=BF16):
            nn.functional.cross_entropy(model(x), target).backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {grads}
        assert {p.dtype for p in model.parameters()} == {BF16}


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", ["mlp", "fused qkv", "cnn"])
def test_remainders_come_back_but_for_ties(name: str, dtype: torch.dtype) -> None:
    """One step from the same state: each master is the float32 one or its neighbor nearer zero."""
    plain, torchs, model, _, _ = twins(name, "adamw", dtype)
    own = fastamp.optim.AdamW(model.parameters(), master="remainder", **OPTIMIZERS["adamw"][2])
    expected = train(plain, torchs, scaler_of(dtype), dtype, steps=1)
    losses = train(model, own, scaler_of(dtype), dtype, steps=1)
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    masters = own.masters()
    off, total = 0, 0
    for want, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        got, want = masters[parameter], want.detach()
        differs = got != want
        if dtype == BF16:
            assert torch.equal(got[differs], torch.nextafter(want, torch.zeros(()))[differs])
        else:
            assert (got - want).abs().max() <= 2.0**-40
            differs &= want.abs() >= 2.0**-14
        off += int(differs.sum())
        total += want.numel()
    assert off <= 1 + total // 20_000


def test_no_region_casts_a_low_precision_weight() -> None:
    _, _, model, own, _ = twins("separate qkv", "adamw", BF16)
    with fastamp.debug.trace() as trace:
        train(model, own, scaler_of(BF16), BF16, steps=2)
    assert trace.totals["weight_casts"] == 0


@pytest.mark.parametrize("remainder", [None, "remainder"])
def test_a_resumed_run_continues_bit_for_bit(remainder: str | None) -> None:
    def fresh() -> tuple[nn.Module, Any]:
        _, _, model, _, _ = twins("fused qkv", "adamw", BF16)
        options = {**OPTIMIZERS["adamw"][2], "master": remainder, "state_dtype": BF16}
        return model, fastamp.optim.AdamW(model.parameters(), **options)

    model, optimizer = fresh()
    train(model, optimizer, scaler_of(BF16), BF16)
    resumed, its_optimizer = fresh()
    resumed.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's do not copy
    expected = train(model, optimizer, scaler_of(BF16), BF16, seed=1)
    losses = train(resumed, its_optimizer, scaler_of(BF16), BF16, seed=1)
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    for one, other in zip(
        optimizer.masters().values(), its_optimizer.masters().values(), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lowered_first", [True, False])
@pytest.mark.parametrize("remainder", [None, "remainder"])
def test_float32_checkpoints_go_both_ways(remainder: str | None, *, lowered_first: bool) -> None:
    """A run that is lowered in one half ends where a float32 run ends (but for ties)."""
    options = OPTIMIZERS["adamw"][2]

    def half(state: Any, *, lowered: bool, seed: int) -> Any:
        model = seeded(MODELS["fused qkv"])
        handle = None
        if lowered:
            handle = fastamp.optim.low_precision_weights_(
                model, example_inputs=batches(1)[0][0], verbose=False
            )
        more = {"master": remainder} if lowered else {}
        optimizer = fastamp.optim.AdamW(model.parameters(), **options, **more)
        if state is not None:
            optimizer.load_state_dict(state[1])
            (model if handle is None else handle).load_state_dict(state[0])
        train(model, optimizer, scaler_of(BF16), BF16, seed=seed)
        weights = model.state_dict() if handle is None else handle.state_dict(optimizer)
        return weights, optimizer.state_dict(portable=True)

    expected = half(half(None, lowered=False, seed=0), lowered=False, seed=1)
    got = half(half(None, lowered=lowered_first, seed=0), lowered=not lowered_first, seed=1)
    assert got[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert got[0][name].dtype == value.dtype
        if remainder is None:
            assert torch.equal(got[0][name], value), name
        else:
            torch.testing.assert_close(got[0][name], value, rtol=2e-4, atol=2e-4)
    torchs = torch.optim.AdamW(seeded(MODELS["fused qkv"]).parameters(), **options)
    torchs.load_state_dict(got[1])
    assert {key for state in torchs.state.values() for key in state} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    assert not {"master", "state_dtype", "state_rounding"} & torchs.param_groups[0].keys()
