# SPDX-License-Identifier: Apache-2.0
"""scaler.pass_ and scaler.unscale: several passes over a loss in one iteration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
import fastamp.optim

SCALE = 2.0**10
RHO = 0.05


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def make_scaler(**options: Any) -> fastamp.GradScaler:
    return fastamp.GradScaler("cpu", **{"init_scale": SCALE, "growth_interval": 4, **options})


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return fastamp.optim.AdamW(model.parameters(), lr=1e-2)


def torchs_fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


MAKERS = pytest.mark.parametrize("make", [plain, fused, torchs_fused])


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    with fastamp.autocast("cpu", dtype=torch.float16):
        out = model(x)
    return out.float().square().mean()


def spoil(model: nn.Module, value: float) -> None:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient.view(-1)[3] = value


@torch.no_grad()
def uphill(model: nn.Module, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    before = [p.clone() for p in model.parameters()]
    torch._foreach_add_(list(model.parameters()), gradients, alpha=RHO)
    return before


@torch.no_grad()
def restore(model: nn.Module, before: list[torch.Tensor]) -> None:
    torch._foreach_copy_(list(model.parameters()), before)


#: What happens to the gradients of the first pass and of the second one, by step.
HISTORY: dict[int, tuple[float | None, float | None]] = {
    2: (float("inf"), None),
    3: (None, float("nan")),
    6: (float("nan"), float("inf")),
}


def by_hand(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    """The recipe of docs/scaler.md, which works with torch's scaler, too."""
    first, second = HISTORY.get(step, (None, None))
    optimizer.zero_grad()
    scaler.scale(loss_of(model, step)).backward()
    if first is not None:
        spoil(model, first)
    gradients = [p.grad / scaler.get_scale() for p in model.parameters()]  # type: ignore[operator]
    before = uphill(model, gradients)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, step)).backward()
    restore(model, before)
    if second is not None:
        spoil(model, second)
    scaler.step(optimizer)
    scaler.update()


def by_pass(model: nn.Module, optimizer: Any, scaler: Any, step: int) -> None:
    first, second = HISTORY.get(step, (None, None))
    with scaler.pass_(optimizer):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if first is not None:
            spoil(model, first)
    before = uphill(model, [p.grad for p in model.parameters()])  # type: ignore[misc]
    optimizer.zero_grad()
    scaler.scale(loss_of(model, step)).backward()
    restore(model, before)
    if second is not None:
        spoil(model, second)
    scaler.step(optimizer)
    scaler.update()


@MAKERS
@pytest.mark.parametrize("reference", [torch.amp.GradScaler, fastamp.GradScaler])
def test_bits_are_those_of_the_recipe_by_hand(make: Callable[..., Any], reference: type):
    own, other = network(), network()
    runs = []
    for model, scaler, one_step in (
        (own, make_scaler(), by_pass),
        (other, reference("cpu", init_scale=SCALE, growth_interval=4), by_hand),
    ):
        optimizer = make(model)
        scales = []
        for step in range(10):
            one_step(model, optimizer, scaler, step)
            scales.append(scaler.get_scale())
        runs.append((scales, optimizer.state_dict()["state"]))
    assert runs[0][0] == runs[1][0]
    assert len(set(runs[0][0])) > 2  # It fell and rose.
    for p, q in zip(own.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    for mine, yours in zip(runs[0][1].values(), runs[1][1].values(), strict=True):
        for name in mine:
            assert torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(yours[name])), name


@MAKERS
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_overflow_in_any_pass_skips_the_step_and_is_reported(make: Any, bad: int):
    model, scaler = network(), make_scaler()
    optimizer = make(model)
    before = copy.deepcopy(model.state_dict())
    for number in range(2):
        with scaler.pass_(optimizer):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            if number == bad:
                spoil(model, float("inf"))
        is_zero = [bool((p.grad == 0).all()) for p in model.parameters()]  # type: ignore[union-attr]
        assert is_zero == [number >= bad] * len(is_zero)  # Then the step is skipped anyway.
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 2)).backward()
    if bad == 2:
        spoil(model, float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_was_skipped
    assert scaler.step_was_skipped_for(optimizer)
    assert scaler.get_scale() == SCALE / 2
    assert [row.name for row in scaler.overflow_report(model).gradients] == ["0.weight"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@MAKERS
@pytest.mark.parametrize("clip", ["norm", "value", "torch"])
@pytest.mark.parametrize("bad", [False, True])
def test_clips_of_the_last_pass_are_the_step_s(make: Any, clip: str, bad: bool):
    results = []
    for passes in (True, False):
        model, scaler = network(), make_scaler()
        optimizer = make(model)
        if passes:
            with scaler.pass_(optimizer):
                scaler.scale(loss_of(model, 0)).backward()
                if bad:
                    spoil(model, float("nan"))
            optimizer.zero_grad()
        scaler.scale(loss_of(model, 1)).backward()
        if clip == "norm":
            scaler.clip_grad_norm_(optimizer, 0.01)
        elif clip == "value":
            scaler.clip_grad_value_(optimizer, 0.001)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped == (bad and passes)
        results.append(list(model.parameters()))
    same = all(torch.equal(p, q) for p, q in zip(*results, strict=True))
    assert same != bad


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_in_fp16_falls_as_in_float32(line_search: str | None):
    finals = []
    for scaled in (True, False):
        model, scaler = network(), make_scaler(enabled=scaled)
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn=line_search)

        def closure(model: Any = model, scaler: Any = scaler, lbfgs: Any = lbfgs) -> Any:
            with scaler.pass_(lbfgs):
                lbfgs.zero_grad()
                loss = loss_of(model, 0)
                scaler.scale(loss).backward()
            return loss

        first = closure().item()
        for _ in range(4):
            lbfgs.step(closure)
            if scaled:
                scaler.update()
                assert not scaler.step_was_skipped
        finals.append(closure().item())
        assert finals[-1] < 0.05 * first
    assert finals[0] == pytest.approx(finals[1], rel=0.2, abs=1e-4)


def test_an_overflow_within_lbfgs_ends_its_step_and_lowers_the_scale():
    model, scaler = network(), make_scaler()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=5)
    calls = []

    def closure() -> Any:
        with scaler.pass_(lbfgs):
            lbfgs.zero_grad()
            loss = loss_of(model, 0)
            scaler.scale(loss).backward()
            if len(calls) == 2:
                spoil(model, float("inf"))
            calls.append(loss.item())
        return loss

    lbfgs.step(closure)
    scaler.update()
    assert len(calls) == 3
    assert scaler.get_scale() == SCALE / 2
    assert [row.name for row in scaler.overflow_report(model).gradients] == ["0.weight"]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    lbfgs.step(closure)
    scaler.update()
    assert calls[-1] < calls[0]
    assert scaler.get_scale() == SCALE / 2


def test_sparse_gradients_and_tied_ones():
    table = nn.Embedding(6, 3, sparse=True)
    optimizer, scaler = torch.optim.SparseAdam(table.parameters()), make_scaler()
    for bad in (False, True):
        with scaler.pass_(optimizer):
            optimizer.zero_grad()
            loss = table(torch.tensor([1, 1, 4])).sum() * (float("inf") if bad else 1.0)
            scaler.scale(loss).backward()
        assert table.weight.grad is not None
        total = table.weight.grad.to_dense().sum().item()
        assert total == (0.0 if bad else 9.0)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


def test_two_optimizers_have_passes_of_their_own():
    models = [network(), network()]
    optimizers, scaler = [plain(m) for m in models], make_scaler()
    with scaler.pass_(optimizers[0]), scaler.pass_(optimizers[1]):
        scaler.scale(sum(loss_of(m, 0) for m in models)).backward()
        spoil(models[0], float("inf"))
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(sum(loss_of(m, 1) for m in models)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [scaler.step_was_skipped_for(optimizer) for optimizer in optimizers] == [True, False]


def test_an_exception_ends_the_pass_alone():
    model, scaler = network(), make_scaler()
    optimizer = plain(model)

    def interrupted() -> None:
        with scaler.pass_(optimizer):
            scaler.scale(loss_of(model, 0)).backward()
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert "_open_passes" not in vars(scaler)
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()  # type: ignore[union-attr]
    optimizer.zero_grad()
    with scaler.pass_(optimizer):
        scaler.scale(loss_of(model, 0)).backward()
    after = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()  # type: ignore[union-attr]
    assert torch.equal(norm / SCALE, after)


def test_a_disabled_scaler_does_nothing():
    model, scaler = network(), make_scaler(enabled=False)
    optimizer = plain(model)
    with scaler.pass_(optimizer), scaler.pass_(optimizer):
        pass
    x = torch.ones(2)
    assert scaler.unscale(x) is x


def test_misuse_is_refused():
    model, scaler = network(), make_scaler()
    optimizer = plain(model)

    def one_pass(work: Callable[[], Any], of: Any = optimizer) -> None:
        with scaler.pass_(of):
            work()

    with pytest.raises(RuntimeError, match=r"^pass_: expected a block that gives its loss"):
        one_pass(lambda: loss_of(model, 0).backward())
    with pytest.raises(RuntimeError, match=r"^pass_: expected an optimizer without an open pass"):
        one_pass(lambda: one_pass(list))
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"^pass_: expected.*at least one gradient, got none"):
        one_pass(lambda: scaler.scale(loss_of(model, 0)))
    assert not scaler._per_optimizer_states
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"^pass_: expected.*got one after unscale_\(\)"):
        scaler.pass_(optimizer).__enter__()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"^pass_: expected.*got one after step\(\)"):
        scaler.pass_(optimizer).__enter__()
    scaler.update()
    half = torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.float16))], lr=1.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16"), scaler.pass_(half):
        scaler.scale(half.param_groups[0]["params"][0].sum()).backward()
    assert not scaler._per_optimizer_states


def test_states_and_pickles_are_torchs_after_passes():
    model, scaler = network(), make_scaler()
    optimizer = plain(model)
    by_pass(model, optimizer, scaler, 0)
    twin = torch.amp.GradScaler("cpu")
    twin.scale(torch.ones(()))
    assert set(vars(copy.deepcopy(scaler))) == set(vars(twin))
    assert set(scaler.state_dict()) == set(twin.state_dict())


@pytest.mark.parametrize("scale", [SCALE, 3.0, 2.0**40])
def test_unscale_is_torchs_recipe_of_a_penalty(scale: float):
    results = []
    for own in (True, False):
        model, scaler = network(), make_scaler(init_scale=scale)
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss = model(inputs).square().mean()
        gradients = torch.autograd.grad(scaler.scale(loss), (inputs,), create_graph=True)
        if own:
            (gradient,) = scaler.unscale(gradients)
        else:
            inverse = 1.0 / scaler.get_scale()
            gradient = gradients[0] * inverse
        scaler.scale(loss + gradient.square().sum()).backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))  # type: ignore[arg-type]


def test_unscale_keeps_structures_and_widens():
    scaler = make_scaler(init_scale=2.0**30)
    with pytest.raises(AssertionError, match=r"unscale"):
        scaler.unscale(torch.ones(2))
    scaler.scale(torch.ones(()))
    ones = torch.ones(2)
    found = scaler.unscale([ones, (ones.half(), None), ones.double(), ones.bfloat16()])
    assert isinstance(found[1], tuple)
    assert found[1][1] is None
    flat = [found[0], found[1][0], found[2], found[3]]
    assert [each.dtype for each in flat] == [torch.float32] * 2 + [torch.float64, torch.float32]
    assert all((each == 2.0**-30).all() for each in flat)
    for wrong in (torch.ones(2, dtype=torch.int64), 3.0, {"a": ones}):
        with pytest.raises(TypeError, match=r"^unscale: expected floating-point tensors"):
            scaler.unscale(wrong)


def sam(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    by_pass(model, optimizer, scaler, 0)


def clipped(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    with scaler.pass_(optimizer):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    before = uphill(model, [p.grad for p in model.parameters()])  # type: ignore[misc]
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0)).backward()
    restore(model, before)
    scaler.step(optimizer)
    scaler.update()


def penalty(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, 0)
    gradients = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
    total = loss + sum(g.square().sum() for g in scaler.unscale(gradients))
    scaler.scale(total).backward()
    scaler.step(optimizer)
    scaler.update()


@MAKERS
@pytest.mark.parametrize("train", [sam, clipped, penalty])
def test_check_finds_nothing(make: Any, train: Any):
    model, scaler = network(), make_scaler()
    optimizer = make(model)

    def step() -> None:
        for _ in range(3):
            train(model, optimizer, scaler)

    report = fastamp.debug.check(model, optimizer, scaler=scaler, step=step)
    assert not report, str(report)


def test_check_finds_nothing_in_lbfgs():
    model, scaler = network(), make_scaler()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Any:
        with scaler.pass_(lbfgs):
            lbfgs.zero_grad()
            loss = loss_of(model, 0)
            scaler.scale(loss).backward()
        return loss

    def step() -> None:
        for _ in range(2):
            lbfgs.step(closure)
            scaler.update()

    report = fastamp.debug.check(model, lbfgs, scaler=scaler, step=step)
    assert not report, str(report)


def test_check_finds_gradients_that_were_not_zeroed():
    model, scaler = network(), make_scaler()
    optimizer = plain(model)

    def step() -> None:
        with scaler.pass_(optimizer):
            scaler.scale(loss_of(model, 0)).backward()
        scaler.scale(loss_of(model, 0)).backward()
        scaler.step(optimizer)
        scaler.update()

    report = fastamp.debug.check(model, optimizer, scaler=scaler, step=step)
    assert [each.rule for each in report.findings] == ["unscale-inside-accumulation"]


def test_check_finds_a_step_after_the_last_pass():
    model, scaler = network(), make_scaler()
    optimizer = plain(model)

    def step() -> None:
        with scaler.pass_(optimizer):
            scaler.scale(loss_of(model, 0)).backward()
        scaler.step(optimizer)
        scaler.update()

    report = fastamp.debug.check(model, optimizer, scaler=scaler, step=step)
    assert [each.rule for each in report.findings] == ["gradients-divided-twice"]
