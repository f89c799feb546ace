# SPDX-License-Identifier: Apache-2.0
"""fastamp.optim.Muon behind a gradient scaler, with 16-bit weights, and in training."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fastamp
from fastamp._C import AmpStep
from support.muon_reference import MuonTwins, assert_close, matrices


def step_with(optimizer, **amp_step):
    optimizer._fastamp_pending_amp_step = AmpStep(**amp_step)
    optimizer.step()


@pytest.mark.parametrize("write_grads", [True, False])
def test_a_step_with_an_amp_step_is_torchs_unscale_clip_and_step(write_grads):
    torch.manual_seed(1)
    twins = MuonTwins([{"params": matrices()}], lr=0.1)
    for _ in range(4):
        twins.set_gradients()
        raw = [p.grad.mul_(1024.0).clone() for p in twins.mine]
        for q, scaled in zip(twins.others, raw, strict=True):
            q.grad = (scaled * (1 / 1024.0) * 0.37).clamp_(-0.5, 0.5)
        twins.own._fastamp_pending_amp_step = AmpStep(
            inv_scale=torch.tensor(1 / 1024.0),
            clip_coef=torch.tensor(0.37),
            found_inf=torch.tensor(0.0),
            clip_value=0.5,
            write_grads=write_grads,
        )
        twins.step()
        for p, q, was in zip(twins.mine, twins.others, raw, strict=True):
            assert torch.equal(p.grad, q.grad if write_grads else was)


@pytest.mark.parametrize("flag", [1.0, 2.0, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_non_zero_flag_skips_and_leaves_every_bit_but_gradients(flag, dtype):
    torch.manual_seed(2)
    params = matrices(dtype=dtype)
    optimizer = fastamp.optim.Muon(params, lr=0.1)

    def set_gradients():
        for p in params:
            p.grad = torch.randn_like(p)

    set_gradients()
    optimizer.step()
    before = [[p.detach().clone(), *map(torch.clone, optimizer.state[p].values())] for p in params]
    set_gradients()
    raw = [p.grad.clone() for p in params]
    step_with(optimizer, inv_scale=torch.tensor(0.5), found_inf=torch.tensor(flag))
    for p, was, grad in zip(params, before, raw, strict=True):
        now = [p.detach(), *optimizer.state[p].values()]
        assert all(torch.equal(a, b) for a, b in zip(now, was, strict=True))
        assert torch.equal(p.grad, grad * 0.5)


def test_a_skipped_first_step_is_no_step():
    torch.manual_seed(3)
    twins = MuonTwins([{"params": matrices()}], lr=0.1)
    for p in twins.mine:
        p.grad = torch.full_like(p, math.inf)
    step_with(twins.own, found_inf=torch.tensor(1.0))
    twins.set_gradients()
    twins.step()


def test_a_scaler_steps_as_torchs_does_around_torchs():
    """Growth, clipping by norm, an overflow, and fused gradients left as they were."""
    torch.manual_seed(4)
    twins = MuonTwins([{"params": matrices()}], lr=0.05)
    own = fastamp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    torchs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(6):
        twins.set_gradients()
        for p, q in zip(twins.mine, twins.others, strict=True):
            p.grad.mul_(own.get_scale())
            q.grad = p.grad.clone()
        if step == 3:
            twins.mine[1].grad[0, 0] = twins.others[1].grad[0, 0] = math.inf
        for scaler in (own, torchs):
            scaler.scale(torch.ones(()))
        norm = own.clip_grad_norm_(twins.own, 1.0)
        torchs.unscale_(twins.torchs)
        expected = torch.nn.utils.clip_grad_norm_(twins.others, 1.0)
        torch.testing.assert_close(norm, expected, equal_nan=True)
        before = [p.detach().clone() for p in twins.mine]
        own.step(twins.own)
        torchs.step(twins.torchs)
        own.update()
        torchs.update()
        assert own.get_scale() == torchs.get_scale()
        for p, q, was in zip(twins.mine, twins.others, before, strict=True):
            # The norm, and so the factor, is summed in another order: near, not equal.
            assert_close(p, q, 0.05 * 2.0)
            assert p.numel() == 0 or torch.equal(p, was) == (step == 3)
            with torch.no_grad():
                q.copy_(p)


def test_skipping_reads_nothing_from_the_device():
    """A meta tensor cannot be read: neither the flag nor a gradient is looked at by the host."""
    params = [nn.Parameter(torch.empty(3, 4, device="meta")) for _ in range(2)]
    optimizer = fastamp.optim.Muon(params)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    for p in params:
        p.grad = torch.empty_like(p)
    flags = {name: torch.tensor(1.0, device="meta") for name in ("inv_scale", "found_inf")}
    step_with(optimizer, **flags)
    assert optimizer.state[params[0]]["momentum_buffer"].is_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("master", ["float32", "remainder"])
def test_16_bit_weights_follow_the_float32_optimizers(dtype, master):
    torch.manual_seed(5)
    params = matrices(dtype=dtype)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = fastamp.optim.Muon(params, lr=0.01, master=master)
    reference = fastamp.optim.Muon(wide, lr=0.01)
    for _ in range(6):
        for p, q in zip(params, wide, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
        masters = optimizer.masters()
        for p, q in zip(params, wide, strict=True):
            if master == "float32":
                assert torch.equal(masters[p], q)
            else:  # Ties are one unit of float32 off; subnormal remainders of float16 2^-40.
                torch.testing.assert_close(masters[p], q.detach(), rtol=2.0**-21, atol=2.0**-38)
            assert torch.equal(p, masters[p].to(dtype))
            with torch.no_grad():
                q.copy_(masters[p])


def test_weight_copies_are_what_the_region_would_cast():
    torch.manual_seed(6)
    models = [nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))]
    models.append(nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)))
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        fastamp.optim.Muon(models[0].parameters(), lr=0.1, autocast_dtype=torch.bfloat16),
        fastamp.optim.Muon(models[1].parameters(), lr=0.1),
    ]
    for _ in range(4):
        x = torch.randn(5, 6)
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            with fastamp.debug.trace() as trace, fastamp.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).float().square().mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if optimizer is optimizers[0]:
                totals = trace.totals
        assert losses[0] == losses[1]
    assert (totals["kept_hits"], totals["weight_casts"]) == (2, 0)


def two_clusters(count):
    """Points on two circles, and which circle."""
    angles = torch.rand(count) * 2 * math.pi
    labels = torch.randint(0, 2, (count,))
    points = torch.stack([angles.cos(), angles.sin()], 1) * (1.0 + labels.unsqueeze(1))
    return points + 0.1 * torch.randn(count, 2), labels


def trained_loss(kind):
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
    )
    matrices_of = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    muon, adamw = kind.Muon(matrices_of, lr=0.02, weight_decay=0.01), kind.AdamW(others, lr=0.02)
    scaler = fastamp.GradScaler("cpu", init_scale=256.0)
    x, labels = two_clusters(128)
    for _ in range(40):
        with fastamp.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), labels)
        muon.zero_grad()
        adamw.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(muon)
        scaler.step(adamw)
        scaler.update()
    return loss.item()


def test_a_model_trains_as_with_torchs():
    own, torchs = trained_loss(fastamp.optim), trained_loss(torch.optim)
    assert own < 0.3  # of 0.7
    assert abs(own - torchs) < 0.02


@pytest.mark.cuda
def test_no_synchronisation_on_cuda_and_the_cpus_steps():
    torch.manual_seed(8)
    params = matrices()
    there = [nn.Parameter(p.detach().cuda()) for p in params]
    amp_step = {"inv_scale": torch.tensor(0.5), "found_inf": torch.tensor(0.0)}
    amp_step_there = {name: value.cuda() for name, value in amp_step.items()}
    here, away = fastamp.optim.Muon(params, lr=0.1), fastamp.optim.Muon(there, lr=0.1)
    for step in range(3):
        for p, q in zip(params, there, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.cuda()
        step_with(here, **amp_step)
        torch.cuda.set_sync_debug_mode("error" if step > 0 else "default")
        try:
            step_with(away, **amp_step_there)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for p, q in zip(params, there, strict=True):
            assert_close(p, q.cpu(), 0.1 * max(1, p.shape[0] / p.shape[1]) ** 0.5)
            with torch.no_grad():
                q.copy_(p)


@pytest.mark.cuda
@pytest.mark.graph
def test_a_captured_step_skips_and_steps_on_cuda():
    (p,) = matrices(((8, 12),))[:1]
    p = nn.Parameter(p.detach().cuda())
    optimizer = fastamp.optim.Muon([p], lr=0.1)
    p.grad = torch.randn_like(p)
    flag = torch.zeros((), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step_with(optimizer, found_inf=flag)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step_with(optimizer, found_inf=flag)
    for value in (1.0, 0.0):
        before = p.detach().clone()
        flag.fill_(value)
        graph.replay()
        assert torch.equal(p, before) == (value != 0.0)
