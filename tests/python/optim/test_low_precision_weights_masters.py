# SPDX-License-Identifier: Apache-2.0
"""Masters of low-precision weights: readers see what was written since, and they end in time."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import fastamp
import fastamp._C as _C

BF16 = torch.bfloat16
KINDS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p, **o: fastamp.optim.SGD(p, lr=0.1, momentum=0.9, **o),
    "adam": lambda p, **o: fastamp.optim.Adam(p, lr=0.1, **o),
    "adamw": lambda p, **o: fastamp.optim.AdamW(p, lr=0.1, **o),
    "muon": lambda p, **o: fastamp.optim.Muon([q for q in p if q.ndim == 2], lr=0.1, **o),
}
kinds = pytest.mark.parametrize("kind", KINDS)
remainders = pytest.mark.parametrize("remainder", [None, "remainder"])


def lowered(model: nn.Module, **options: Any) -> fastamp.optim.LowPrecisionWeights:
    return fastamp.optim.low_precision_weights_(model, verbose=False, **options)


def step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, 0.25)
    optimizer.step()


def load_threes(model: nn.Module) -> None:
    model.load_state_dict({k: torch.full_like(v, 3.0) for k, v in model.state_dict().items()})


WRITES: dict[str, Callable[[nn.Linear], None]] = {
    "load_state_dict": load_threes,
    "copy_": lambda m: [p.detach().fill_(3.0) for p in m.parameters()] and None,
    "data": lambda m: (
        [setattr(p, "data", torch.full_like(p, 3.0)) for p in m.parameters()] and None
    ),
}


@kinds
@remainders
@pytest.mark.parametrize("write", WRITES)
def test_every_reader_before_the_first_step_sees_what_was_written(
    kind: str, remainder: str | None, write: str
) -> None:
    model = nn.Linear(64, 64)
    handle = lowered(model)
    optimizer = KINDS[kind](list(model.parameters()), master=remainder)
    WRITES[write](model)
    threes = torch.full((64, 64), 3.0)
    assert torch.equal(handle.state_dict()["weight"], threes)
    assert torch.equal(handle.state_dict(optimizer)["weight"], threes)
    assert torch.equal(optimizer.masters()[model.weight], threes)
    saved = optimizer.state_dict()["state"][0]
    assert "master_remainder" in saved if remainder else torch.equal(saved["master_param"], threes)
    other = KINDS[kind]([nn.Parameter(model.weight.detach().clone())], master=remainder)
    other.load_state_dict(saved_for_one(optimizer))
    assert torch.equal(next(iter(other.masters().values())), threes)


def saved_for_one(optimizer: Any) -> dict[str, Any]:
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["params"] = [0]
    saved["state"] = {0: saved["state"][0]}
    return saved


@kinds
def test_every_reader_after_a_step_sees_what_was_written(kind: str) -> None:
    model = nn.Linear(64, 64)
    handle = lowered(model)
    optimizer = KINDS[kind](list(model.parameters()))
    step(optimizer)
    load_threes(model)
    threes = torch.full((64, 64), 3.0)
    assert torch.equal(handle.state_dict(optimizer)["weight"], threes)
    assert torch.equal(optimizer.masters()[model.weight], threes)


def test_elements_that_were_not_written_keep_their_masters() -> None:
    model = nn.Linear(64, 64)
    master = model.weight.detach().clone()
    handle = lowered(model)
    with torch.no_grad():
        model.weight[0] = 3.0
    expected = master.clone()
    expected[0] = 3.0
    assert torch.equal(handle.state_dict()["weight"], expected)
    assert not torch.equal(expected[1:], expected[1:].to(BF16).float())


@remainders
def test_remainders_and_masters_are_forgotten_before_the_first_step_and_after(
    remainder: str | None,
) -> None:
    model = nn.Linear(64, 64)
    lowered(model)
    optimizer = fastamp.optim.AdamW(model.parameters(), master=remainder)
    values = model.weight.detach().float()
    assert not torch.equal(optimizer.masters()[model.weight], values)
    optimizer.forget_remainders()
    assert torch.equal(optimizer.masters()[model.weight], values)
    step(optimizer)
    assert not torch.equal(optimizer.masters()[model.weight], model.weight.float())
    optimizer.forget_remainders([model.weight])
    assert torch.equal(optimizer.masters()[model.weight], model.weight.float())
    assert not torch.equal(optimizer.masters()[model.bias], model.bias.float())


def test_a_loaded_float32_master_is_forgotten_in_a_group_with_remainders() -> None:
    params = [nn.Parameter(torch.randn(64).to(BF16)) for _ in range(2)]
    source, target = (fastamp.optim.SGD([p], lr=0.1) for p in params)
    step(source)
    target.param_groups[0]["master"] = "remainder"
    target.load_state_dict(
        {**source.state_dict(), "param_groups": target.state_dict()["param_groups"]}
    )
    params[1].data.copy_(params[0])
    target.forget_remainders()
    params[1].grad = torch.zeros_like(params[1])
    target.step()
    assert torch.equal(target.masters()[params[1]], params[0].detach().float())


class Experts(nn.Module):
    """The second one is not used in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](x)


def train(model: nn.Module, optimizer: Any, expert: int, steps: int = 3) -> None:
    for seed in range(steps):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            model(x, expert).float().square().mean().backward()
        optimizer.step()


@kinds
@remainders
def test_a_resumed_run_goes_on_bit_for_bit_for_what_was_not_stepped_yet(
    kind: str, remainder: str | None, tmp_path: Any
) -> None:
    def fresh(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = Experts()
        lowered(model)
        return model, KINDS[kind](list(model.parameters()), master=remainder)

    model, optimizer = fresh(0)
    train(model, optimizer, 0)
    assert len(optimizer.state) == 1
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x")
    assert len(optimizer.state) == 1  # A checkpoint changes nothing.
    saved = torch.load(tmp_path / "x")
    resumed, its_optimizer = fresh(1)
    resumed.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    for one, its in ((model, optimizer), (resumed, its_optimizer)):
        train(one, its, 1)
    for one, other in zip(
        optimizer.masters().values(), its_optimizer.masters().values(), strict=True
    ):
        assert torch.equal(one, other)


def test_torchs_optimizers_load_what_was_not_stepped_yet() -> None:
    for own, torchs in (
        (fastamp.optim.AdamW, torch.optim.AdamW),
        (fastamp.optim.SGD, torch.optim.SGD),
    ):
        model = Experts()
        lowered(model)
        optimizer = own(model.parameters(), lr=0.1)
        train(model, optimizer, 0)
        plain = [nn.Parameter(torch.ones(16, 16)) for _ in range(2)]
        other = torchs(plain, lr=0.1)
        for portable in (False, True):
            other.load_state_dict(copy.deepcopy(optimizer.state_dict(portable=portable)))
            for p in plain:
                p.grad = torch.ones(16, 16)
            other.step()


def master_of(weight: torch.Tensor) -> weakref.ref[torch.Tensor]:
    """The one that is kept; what readers get may be another tensor."""
    master = _C.kept_starting_master(weight)
    assert master is not None
    _C.set_starting_masters([weight], [master])
    return weakref.ref(master)


def test_masters_are_freed_with_their_parameters() -> None:
    model = nn.Linear(8, 8)
    lowered(model)
    masters = [master_of(p) for p in model.parameters()]
    del model
    gc.collect()
    assert [master() for master in masters] == [None, None]
    assert not _C.with_starting_masters()


def test_masters_of_frozen_parameters_are_freed_when_an_optimizer_is_made() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    lowered(model)
    frozen, trained = master_of(model[0].weight), master_of(model[1].weight)
    model[0].requires_grad_(False)
    fastamp.optim.SGD(model[1].parameters(), lr=0.1)
    assert frozen() is None
    assert trained() is not None


def test_masters_of_frozen_parameters_are_freed_by_a_step_of_their_optimizer() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    lowered(model)
    optimizer = fastamp.optim.SGD(model.parameters(), lr=0.1)
    frozen = master_of(model[0].weight)
    model[0].requires_grad_(False)
    model[1].weight.grad = torch.zeros(8, 8)
    optimizer.step()
    assert frozen() is None
    assert _C.starting_master_of(model[1].bias) is not None


def test_masters_of_a_network_that_is_frozen_for_the_step_of_another_stay() -> None:
    """As the discriminator of a GAN is."""
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    lowered(one)
    lowered(other)
    optimizers = [fastamp.optim.SGD(m.parameters(), lr=0.1) for m in (one, other)]
    expected = optimizers[1].masters()[other.weight].clone()
    other.requires_grad_(False)
    step(optimizers[0])
    other.requires_grad_(True)
    assert torch.equal(optimizers[1].masters()[other.weight], expected)
    assert not torch.equal(expected, expected.to(BF16).float())


def test_averaging_16_bits_is_refused_with_the_way() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    handle = lowered(model)
    for whole in (model, nn.Sequential(model), model[0]):
        with pytest.raises(
            NotImplementedError, match=r"LowPrecisionWeights\.state_dict\(optimizer\)"
        ):
            swa_utils.AveragedModel(whole, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.999))
    assert copy.deepcopy(model)[0].weight.dtype == BF16
    optimizer = fastamp.optim.SGD(model.parameters(), lr=1e-3)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    averages = {k: v.clone() for k, v in handle.state_dict(optimizer).items()}
    expected = torch.ones((), dtype=torch.float64)
    master = torch.ones((), dtype=torch.float64)
    for _ in range(400):
        step(optimizer)
        for name, value in handle.state_dict(optimizer).items():
            averages[name].lerp_(value, 1e-3)
        master -= 0.25e-3
        expected.lerp_(master, 1e-3)
    assert expected < 0.99
    torch.testing.assert_close(
        averages["0.weight"].double(), expected.expand(8, 8), rtol=0, atol=1e-5
    )


AVERAGES: dict[str, dict[str, Any]] = {
    "default": {},
    "multi": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "each": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "buffers": {"avg_fn": swa_utils.get_ema_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize("options", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("began", [False, True], ids=["", "began before"])
def test_averages_that_were_made_before_refuse_16_bits_and_take_float32(
    options: dict[str, Any], began: bool
) -> None:
    """With the way that docs/optim.md shows: a model without memory, filled before each update."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    other = copy.deepcopy(model)
    averages, expected = (swa_utils.AveragedModel(each, **options) for each in (model, other))
    float32 = copy.deepcopy(model).to("meta")
    if began:
        averages.update_parameters(model)
        expected.update_parameters(other)
    handle = lowered(model)
    optimizers = [fastamp.optim.SGD(m.parameters(), lr=1e-3) for m in (model, other)]
    before = copy.deepcopy(averages.state_dict())
    for whole in (model, nn.Sequential(model), nn.Sequential(model[0], nn.BatchNorm1d(8))):
        with pytest.raises(
            NotImplementedError, match=r"LowPrecisionWeights\.state_dict\(optimizer\)"
        ):
            averages.update_parameters(whole)
    assert all(torch.equal(before[name], now) for name, now in averages.state_dict().items())
    for _ in range(3):
        for optimizer in optimizers:
            step(optimizer)
        float32.load_state_dict(handle.state_dict(optimizers[0]), assign=True)
        averages.update_parameters(float32)
        expected.update_parameters(other)
    for name, value in expected.state_dict().items():
        assert torch.equal(averages.state_dict()[name], value), name


def test_swapping_low_precision_weights_is_refused_and_changes_nothing() -> None:
    """They are known by identity, which torch asks by weak references: docs/compatibility.md."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    lowered(model)
    optimizer = fastamp.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):  # before the first step and after
        values = [p.detach().clone() for p in model.parameters()]
        masters = {p: master.clone() for p, master in optimizer.masters().items()}
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(8, 8)))
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with pytest.raises(RuntimeError, match=r"Couldn't swap Linear\.weight"):
                model.to(torch.float64)
            with pytest.raises(RuntimeError, match="weakref"):
                model.load_state_dict(model.state_dict())
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert all(map(torch.equal, model.parameters(), values))
        assert all(torch.equal(optimizer.masters()[p], master) for p, master in masters.items())
        assert _C.is_low_precision_weight(model[0].weight)
        step(optimizer)
    load_threes(model)  # torch's default, which writes into the weights
    assert model[0].weight.dtype == BF16
    assert (optimizer.masters()[model[0].weight] == 3).all()


@kinds
@remainders
def test_loaded_float32_weights_are_the_masters_of_whoever_steps_next(
    kind: str, remainder: str | None
) -> None:
    model = nn.Linear(64, 64)
    handle = lowered(model)
    optimizer = KINDS[kind](list(model.parameters()), master=remainder)
    step(optimizer)
    # Masters that round to what the weights are, and others.
    values = {k: v.float() * (1 + 2.0**-10) for k, v in model.state_dict().items()}
    values["weight"][:32] = torch.randn(32, 64)
    handle.load_state_dict(values)
    assert torch.equal(handle.state_dict()["weight"], values["weight"])
    assert torch.equal(optimizer.masters()[model.weight], values["weight"])
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = KINDS[kind](
        [nn.Parameter(p.detach().clone()) for p in model.parameters()], master=remainder
    )
    fresh.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer)
    for found in (optimizer.masters()[model.weight], next(iter(fresh.masters().values()))):
        if remainder is None:
            assert torch.equal(found, values["weight"])
        torch.testing.assert_close(found, values["weight"], rtol=2.0**-23, atol=0)
