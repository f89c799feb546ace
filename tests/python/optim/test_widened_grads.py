# SPDX-License-Identifier: Apache-2.0
"""fuse_(widen_grads=True): fp16 gradients are unscaled, clipped and stepped in float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
import fastamp.optim

SCALE = 2.0**10


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).half()


def widened(model: nn.Module, kind: str = "AdamW") -> torch.optim.Optimizer:
    made = getattr(torch.optim, kind)(model.parameters(), lr=1e-2)
    optimizer: torch.optim.Optimizer = fastamp.optim.fuse_(made, widen_grads=True)
    return optimizer


def backward(model: nn.Module, scaler: Any, factor: float = 1.0) -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(x).float().square().mean() * factor
    scaler.scale(loss).backward()


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_are_those_of_float32_weights(kind: str, set_to_none: bool):
    half, full = network(), network().float()
    own, torchs = widened(half, kind), getattr(torch.optim, kind)(full.parameters(), lr=1e-2)
    scalers = [each("cpu", init_scale=SCALE) for each in (fastamp.GradScaler, torch.amp.GradScaler)]
    for _ in range(6):
        norms = []
        for model, optimizer, scaler in zip((half, full), (own, torchs), scalers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            for _ in range(2):  # Two micro-batches.
                backward(model, scaler, 0.5)
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            scaler.step(optimizer)
            scaler.update()
        assert norms[0].dtype == torch.float32
        torch.testing.assert_close(norms[0], norms[1], rtol=2e-3, atol=0)
    masters = own.masters()  # type: ignore[attr-defined]
    for p, q in zip(half.parameters(), full.parameters(), strict=True):
        assert p.dtype == torch.float16
        assert torch.equal(p, masters[p].half())
        torch.testing.assert_close(masters[p], q.detach(), rtol=0, atol=2e-3)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_with_a_graph_keep_it():
    weight = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float16))
    optimizer = fastamp.optim.fuse_(torch.optim.SGD([weight], lr=1.0), widen_grads=True)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(weight.square().sum()).backward(create_graph=True)
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert weight.grad.requires_grad
    assert weight.grad.tolist() == [4.0] * 3


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_masters_of_weights_that_are_lowered_have_the_bits_of_float32_weights(kind: str):
    half, full = network(), network().float()
    actual = widened(half, kind)
    expected = fastamp.optim.fuse_(getattr(torch.optim, kind)(full.parameters(), lr=1e-2))
    for _ in range(20):
        for model, optimizer in ((half, actual), (full, expected)):
            scaler = fastamp.GradScaler("cpu", init_scale=SCALE)
            optimizer.zero_grad()
            backward(model, scaler)
            scaler.unscale_(optimizer)
            fastamp.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    masters = actual.masters()  # type: ignore[attr-defined]
    start = list(network().parameters())
    for p, q, first in zip(half.parameters(), full.parameters(), start, strict=True):
        assert torch.equal(masters[p], q)
        assert not torch.equal(p, first)


def test_small_gradients_survive_unscaling():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = fastamp.optim.fuse_(torch.optim.SGD([parameter], lr=1.0), widen_grads=True)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.full((4,), 2.0**-14, dtype=torch.float16)
    scaler.unscale_(optimizer)
    assert parameter.grad.dtype == torch.float32
    assert torch.equal(parameter.grad, torch.full((4,), 2.0**-30))  # 0 in fp16


def test_an_overflow_in_fp16_skips_the_step_and_is_reported():
    model = network()
    optimizer, scaler = widened(model), fastamp.GradScaler("cpu", init_scale=SCALE)
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, scaler)
    model[2].bias.grad[1] = float("inf")  # type: ignore[union-attr, index]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_was_skipped
    assert [row.name for row in scaler.overflow_report(model).gradients] == ["2.bias"]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_without_the_option_torchs_error_names_the_way_out():
    for make in (torch.optim.SGD, fastamp.optim.SGD):
        parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))
        optimizer = make([parameter], lr=1.0)
        scaler = fastamp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        parameter.grad = torch.ones_like(parameter)
        said = r"Attempting to unscale FP16 gradients.*fuse_\(optimizer, widen_grads=True\)"
        with pytest.raises(ValueError, match=said):
            scaler.unscale_(optimizer)
        assert parameter.grad.dtype == torch.float16


def test_the_option_can_be_taken_back_and_is_checked():
    model = network()
    optimizer, scaler = widened(model), fastamp.GradScaler("cpu", init_scale=SCALE)
    fastamp.optim.fuse_(optimizer)  # Leaves it as it is.
    fastamp.optim.fuse_(optimizer, widen_grads=False)
    backward(model, scaler)
    with pytest.raises(ValueError, match="Attempting"):
        scaler.unscale_(optimizer)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(TypeError, match=r"^fuse_: expected widen_grads to be a bool or None"):
        fastamp.optim.fuse_(plain, widen_grads=1)  # type: ignore[arg-type]
    assert type(plain) is torch.optim.SGD


def test_a_torch_without_grad_dtype_is_refused(monkeypatch: pytest.MonkeyPatch):
    older = SimpleNamespace(Tensor=object, __version__="2.10.0")
    monkeypatch.setattr("fastamp.optim._low_precision_weights.torch", older)
    plain = torch.optim.SGD(network().parameters(), lr=1.0)
    with pytest.raises(NotImplementedError, match=r"^fuse_: expected a torch with.*got 2\.10"):
        fastamp.optim.fuse_(plain, widen_grads=True)
    assert type(plain) is torch.optim.SGD


def test_a_step_without_unscale_widens_nothing():
    model = network()
    optimizer, scaler = widened(model), fastamp.GradScaler("cpu", init_scale=SCALE)
    backward(model, scaler)
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    scaler.update()
    assert all(p.grad is not None and p.grad.dtype == torch.float16 for p in model.parameters())
