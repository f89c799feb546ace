# SPDX-License-Identifier: Apache-2.0
"""What is written is checked: nothing is stepped by an inverse, factor or value that is not finite.

torch.amp checks what it reads. After many overflows its 1 / scale is infinite, and the first clean
step makes all weights inf or NaN.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fastamp
from support.scaler_pairs import bits

# Below and above a chunk of the kernels, and enough for threads.
SIZES = ((4, 4), (50, 60), (300, 900))


def make(kind: str, parameters: list[Any]) -> Any:
    name, _, how = kind.partition(" ")
    options: dict[str, Any] = {"lr": 0.1}
    if how == "fastamp":
        return getattr(fastamp.optim, name)(parameters, **options)
    optimizer = getattr(torch.optim, name)(parameters, **options)
    return fastamp.optim.fuse_(optimizer) if how == "fused" else optimizer


KINDS = [
    f"{name} {how}" for name in ("SGD", "Adam", "AdamW", "Muon") for how in ("fastamp", "fused")
]
KINDS += ["SGD torch", "AdamW torch"]
CALLS = ["step", "unscale", "clip", "unscale and clip", "clip by value", "torch's clip"]


def parameters(sizes: Any = SIZES) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size)) for size in sizes]


def iterate(scaler: Any, optimizer: Any, gradients: Any, call: str = "step") -> None:
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    scaler.scale(torch.ones(()))
    for parameter, gradient in zip(owned, gradients, strict=True):
        parameter.grad = gradient.clone()
    if call in ("unscale", "unscale and clip", "torch's clip"):
        scaler.unscale_(optimizer)
    if call in ("clip", "unscale and clip"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    if call == "torch's clip":
        torch.nn.utils.clip_grad_norm_(owned, 1.0)
    if call == "clip by value":
        scaler.clip_grad_value_(optimizer, 0.1)
    scaler.step(optimizer)
    scaler.update()


def quiet_iterate(*arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        iterate(*arguments)
    return [str(each.message) for each in caught]


def values_of(owned: list[torch.nn.Parameter], optimizer: Any) -> list[Any]:
    """Parameters and, behind them, what state there is: a skipped first step makes zeros."""
    state = [optimizer.state[p] for p in owned if p in optimizer.state]
    tensors = [t for each in state for t in each.values() if isinstance(t, torch.Tensor)]
    return [t.detach().clone() for t in (*owned, *tensors)]


def equal(found: list[Any], before: list[Any]) -> bool:
    same = all(torch.equal(a, b) for a, b in zip(found, before, strict=False))
    return same and not any(bool(made.any()) for made in found[len(before) :])


def sizes_for(kind: str) -> Any:
    return SIZES[:2] if kind.startswith("Muon") else SIZES  # its products take their time


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["SGD fastamp", "AdamW fused", "SGD torch"])
def test_clean_steps_after_many_overflows_are_skipped_and_told(kind: str, call: str) -> None:
    owned = parameters()
    optimizer = make(kind, owned)
    scaler = fastamp.GradScaler("cpu")
    ones = [torch.ones(size) for size in SIZES]
    iterate(scaler, optimizer, ones, call)  # there is state to be spoilt
    bad = [torch.full(size, float("inf")) for size in SIZES]
    said = [text for _ in range(145) for text in quiet_iterate(scaler, optimizer, bad, call)]
    assert scaler.get_scale() == 65536.0 * 2.0**-145  # torch's, bit for bit
    before = values_of(owned, optimizer)
    for _ in range(3):
        said += quiet_iterate(scaler, optimizer, ones, call)
        assert scaler.step_was_skipped
    assert equal(values_of(owned, optimizer), before)
    warned = [text for text in said if "inverse is not finite" in text]
    assert len(warned) == 1
    assert "update(new_scale)" in warned[0]
    assert "min_scale" in warned[0]
    scaler.update(1024.0)
    iterate(scaler, optimizer, ones, call)
    assert not scaler.step_was_skipped
    assert not equal(values_of(owned, optimizer), before)


@pytest.mark.parametrize(
    ("kind", "call", "scale"),
    [(kind, call, 2.0**-129) for kind in KINDS for call in CALLS]
    + [(kind, "step", scale) for kind in KINDS[::3] for scale in (2.0**-149, 0.0, float("nan"))],
)
def test_a_scale_without_an_inverse_steps_nothing(kind: str, call: str, scale: float) -> None:
    sizes = sizes_for(kind)
    owned = parameters(sizes)
    optimizer = make(kind, owned)
    scaler = fastamp.GradScaler("cpu", init_scale=scale)
    before = values_of(owned, optimizer)
    said = quiet_iterate(scaler, optimizer, [torch.full(size, 1e-3) for size in sizes], call)
    assert scaler.step_was_skipped
    assert equal(values_of(owned, optimizer), before)
    assert any("inverse is not finite" in text for text in said)


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_scale_with_an_inverse_steps(kind: str) -> None:
    sizes = sizes_for(kind)
    owned = parameters(sizes)
    optimizer = make(kind, owned)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0**-127)
    before = values_of(owned, optimizer)
    assert quiet_iterate(scaler, optimizer, [torch.full(size, 2.0**-130) for size in sizes]) == []
    assert not scaler.step_was_skipped
    assert not equal(values_of(owned, optimizer)[: len(owned)], before)


@pytest.mark.parametrize(
    ("kind", "call", "where"),
    [(kind, call, 1) for kind in KINDS for call in CALLS]
    + [(kind, call, at) for kind in KINDS[::3] for call in ("step", "unscale") for at in (0, 2)],
)
def test_a_finite_gradient_that_overflows_when_it_is_unscaled(
    kind: str, call: str, where: int
) -> None:
    sizes = SIZES if where == 2 else sizes_for(kind)
    owned = parameters(sizes)
    optimizer = make(kind, owned)
    scaler = fastamp.GradScaler("cpu", init_scale=1e-30)
    gradients = [torch.full(size, 1e-30) for size in sizes]
    gradients[where].view(-1)[-1] = 1e20
    before = values_of(owned, optimizer)
    iterate(scaler, optimizer, gradients, call)
    assert scaler.step_was_skipped
    assert scaler.get_scale() == pytest.approx(5e-31)
    assert equal(values_of(owned, optimizer), before)
    report = scaler.overflow_report()
    assert [(g.index, g.inf, g.nan) for g in report.gradients] == [(where, 1, 0)]


@pytest.mark.parametrize("call", ["step", "unscale"])
@pytest.mark.parametrize("how", ["fastamp", "fused", "torch"])
def test_finite_products_with_a_norm_beyond_fp32_are_stepped_by(how: str, call: str) -> None:
    """Steps that torch takes stay: the norm bounds the elements, but does not decide."""
    results = []
    for kind, name in ((fastamp.GradScaler, how), (torch.amp.GradScaler, "torch")):
        owned = parameters(((50, 60),))
        optimizer = make(f"SGD {name}", owned)
        optimizer.param_groups[0]["lr"] = 1e-38
        scaler = kind("cpu", init_scale=0.5)
        iterate(scaler, optimizer, [torch.full((50, 60), 1.5e38)], call)
        assert scaler.get_scale() == 0.5
        results.append(bits(owned[0]))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_torchs_fused_steps_divide_and_stay_finite_as_with_torchs_scaler(name: str) -> None:
    results = []
    for kind in (fastamp.GradScaler, torch.amp.GradScaler):
        owned = parameters()
        optimizer = getattr(torch.optim, name)(owned, lr=0.1, fused=True)
        scaler = kind("cpu")
        bad = [torch.full(size, float("inf")) for size in SIZES]
        for _ in range(145):
            quiet_iterate(scaler, optimizer, bad)
        quiet_iterate(scaler, optimizer, [torch.full(size, 1e-38) for size in SIZES])
        assert all(bool(p.isfinite().all()) for p in owned)
        results.append(([bits(p) for p in owned], scaler.state_dict()))
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("max_norm", "gradient"), [(float("nan"), 1.0), (float("inf"), 1.7e38), (float("-inf"), 1.0)]
)
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_clipping_factor_that_is_not_finite(
    kind: str, max_norm: float, gradient: float, unscaled: bool
) -> None:
    owned = parameters(sizes_for(kind))
    optimizer = make(kind, owned)
    scaler = fastamp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    for parameter in owned:
        parameter.grad = torch.full_like(parameter, gradient)
    before = values_of(owned, optimizer)
    if unscaled:
        scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_was_skipped
    assert equal(values_of(owned, optimizer), before)


class Wrapped(torch.Tensor):
    """Gradients of a class that has torch's operators."""


def test_gradients_of_a_subclass_are_checked_after_they_are_written() -> None:
    parameter = torch.nn.Parameter(torch.ones(3).as_subclass(Wrapped))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=1e-30)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor([1.0, 1e20, 1.0]).as_subclass(Wrapped)
    assert type(parameter.grad) is Wrapped
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_was_skipped
    assert parameter.tolist() == [1.0] * 3


@pytest.mark.parametrize("factor", ["inv_scale", "clip_coef"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_the_amp_step_of_a_step_is_closed_by_a_factor(factor: str, value: float) -> None:
    """For those who call the op without the flag of a pass."""
    parameter, gradient = torch.ones(3000), torch.ones(3000)
    lists: Any = [[parameter], [gradient], [], [], [], [1], [0.1], [0.0], [0.0], [0.1]]
    torch.ops.fastamp.fused_sgd_(
        *lists, [False], [False], [], [], [], **{factor: torch.tensor(value)}
    )
    assert parameter.eq(1.0).all()
