# SPDX-License-Identifier: Apache-2.0
"""What a gradient scaler hands a step, an AmpStep: unscale, clip and skip on the device."""

from __future__ import annotations

import math

import pytest
import torch

import fastamp
from fastamp._C import AmpStep
from support.amp_reference import DEVICES, assert_same_bits
from support.amp_step_pairs import supports_amp_step
from support.optim_twins import PAIRS, Twins, assert_same_parameters, parameters

devices = pytest.mark.parametrize("device", DEVICES)
names = pytest.mark.parametrize("name", PAIRS)


def scalar(value, device="cpu"):
    return torch.tensor(value, dtype=torch.float32, device=device)


def step_with(optimizer, *args, **amp_step):
    optimizer._fastamp_pending_amp_step = AmpStep(**amp_step)
    try:
        return optimizer.step(*args)
    finally:
        assert "_fastamp_pending_amp_step" not in optimizer.__dict__


def snapshot(optimizer):
    """Parameters and states, as values."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        [p.detach().clone(), {k: v.clone() for k, v in optimizer.state.get(p, {}).items()}]
        for p in params
    ]


def assert_same_snapshot(first, second):
    for (p, state), (q, other) in zip(first, second, strict=True):
        assert_same_bits(p, q)
        assert state.keys() == other.keys()
        for key in state:
            assert_same_bits(state[key], other[key])


@devices
@names
@pytest.mark.parametrize("clip", [None, 0.37])
def test_a_step_with_an_amp_step_is_torchs_unscale_clip_and_step(device, name, clip):
    torch.manual_seed(1)
    twins = Twins(name, [{"params": parameters(device=device)}], lr=0.1)
    for _ in range(20):
        twins.set_gradients(lambda p: torch.randn_like(p) * 1024.0)
        raw = [p.grad.clone() for p in twins.mine]
        for q in twins.others:
            q.grad.mul_(1 / 1024.0)
            q.grad.mul_(1.0 if clip is None else clip)
        twins.own._fastamp_pending_amp_step = AmpStep(
            inv_scale=scalar(1 / 1024.0, device),
            clip_coef=None if clip is None else scalar(clip, device),
            found_inf=scalar(0.0, device),
        )
        twins.step()
        for p, q, was in zip(twins.mine, twins.others, raw, strict=True):
            assert_same_bits(p.grad, q.grad)
            assert p.grad.shape == was.shape


@devices
@names
@pytest.mark.parametrize("flag", [1.0, 2.0, -1.0, math.nan, math.inf])
def test_any_non_zero_flag_skips_and_leaves_everything_but_gradients(device, name, flag):
    torch.manual_seed(2)
    twins = Twins(name, [{"params": parameters(device=device)}], lr=0.1)
    twins.set_gradients()
    twins.step()
    before = snapshot(twins.own)
    twins.set_gradients()
    raw = [p.grad.clone() for p in twins.mine]
    step_with(twins.own, inv_scale=scalar(0.5, device), found_inf=scalar(flag, device))
    assert_same_snapshot(snapshot(twins.own), before)
    for p, was in zip(twins.mine, raw, strict=True):
        assert_same_bits(p.grad, was * 0.5)


@names
def test_a_flag_of_two_makes_torchs_fused_step_corrupt_parameters_and_not_fastamps(name):
    torch.manual_seed(3)
    own, torchs = PAIRS[name]
    bad = torch.full((8,), math.inf)
    p, q = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
    p.grad, q.grad = bad.clone(), bad.clone()
    reference = torchs([q], lr=0.1, fused=True)
    reference.grad_scale, reference.found_inf = scalar(1.0), scalar(2.0)
    reference.step()
    assert not q.isfinite().all()  # torch compares the flag with 1
    step_with(own([p], lr=0.1), inv_scale=scalar(1.0), found_inf=scalar(2.0))
    assert torch.equal(p.detach(), torch.ones(8))


def test_buffers_of_a_skipped_first_step_start_at_the_next_one():
    (p,) = parameters(((6,),))
    optimizer = fastamp.optim.SGD([p], lr=0.1, momentum=0.9, dampening=0.5)
    p.grad = torch.ones_like(p)
    step_with(optimizer, found_inf=scalar(1.0))
    saved = optimizer.state_dict()["state"][0]
    assert saved["momentum_buffer"] is None
    p.grad = torch.full_like(p, 3.0)
    step_with(optimizer, found_inf=scalar(0.0))
    assert optimizer.state[p]["momentum_buffer"].tolist() == [3.0] * 6  # not dampened
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].tolist() == [3.0] * 6


@devices
def test_write_grads_off_leaves_gradients_as_they_were(device):
    params = parameters(device=device)
    optimizer = fastamp.optim.SGD(params, lr=0.5)
    others = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.randn_like(p)
    raw = [(p.grad.clone(), p.grad._version, p.grad.data_ptr()) for p in params]
    step_with(optimizer, inv_scale=scalar(0.25, device), write_grads=False)
    for p, q, (grad, version, address) in zip(params, others, raw, strict=True):
        assert_same_bits(p.grad, grad)
        assert (p.grad._version, p.grad.data_ptr()) == (version, address)
        torch.testing.assert_close(p.detach(), q - 0.125 * grad)


def test_a_step_without_an_amp_step_touches_no_gradient():
    params = parameters()
    optimizer = fastamp.optim.AdamW(params)
    for p in params:
        p.grad = torch.randn_like(p)
    versions = [p.grad._version for p in params]
    optimizer.step()
    assert [p.grad._version for p in params] == versions


def test_the_amp_step_counts_for_one_step_and_goes_even_if_it_raises():
    (p,) = parameters(((2,),))
    optimizer = fastamp.optim.Adam([p])
    p.grad = torch.sparse_coo_tensor([[0]], [1.0], (2,))
    optimizer._fastamp_pending_amp_step = AmpStep()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        optimizer.step()
    assert "_fastamp_pending_amp_step" not in optimizer.__dict__


def test_a_closure_behind_an_amp_step_is_refused():
    (p,) = parameters(((2,),))
    optimizer = fastamp.optim.SGD([p])
    p.grad = torch.ones(2)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="step: expected no closure with an AmpStep"):
        step_with(optimizer, lambda: 1.0)
    assert torch.equal(p.detach(), before)


def test_who_takes_an_amp_step():
    class OwnStep(fastamp.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    class Plain(fastamp.optim.SGD):
        pass

    (p,) = parameters(((2,),))
    for name, (own, torchs) in PAIRS.items():
        assert supports_amp_step(own([p])), name
        assert not supports_amp_step(torchs([p]))
    assert supports_amp_step(Plain([p]))
    assert not supports_amp_step(OwnStep([p]))
    assert not supports_amp_step(None)


def test_hooks_run_around_a_step_with_an_amp_step():
    (p,) = parameters(((2,),))
    optimizer = fastamp.optim.SGD([p], lr=1.0)
    p.grad = torch.ones(2)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("pre", p.grad.tolist())))
    optimizer.register_step_post_hook(lambda *_: seen.append(("post", p.grad.tolist())))
    step_with(optimizer, inv_scale=scalar(0.5))
    assert seen == [("pre", [1.0, 1.0]), ("post", [0.5, 0.5])]


@pytest.mark.parametrize("write_grads", [True, False])
@pytest.mark.parametrize("flag", [0.0, 2.0])
def test_parameters_of_torchs_own_step_pass_the_same_amp_step(write_grads, flag):
    """float64 has no fused kernel; a sparse gradient neither."""
    plain, double = torch.ones(3), torch.ones(3, dtype=torch.float64)
    table = torch.nn.Parameter(torch.ones(4, 2))
    params = [torch.nn.Parameter(plain), torch.nn.Parameter(double), table]
    optimizer = fastamp.optim.SGD(params, lr=1.0)
    for p in params[:2]:
        p.grad = torch.full_like(p, 4.0)
    table.grad = torch.sparse_coo_tensor([[1, 1]], torch.full((2, 2), 4.0), (4, 2))
    step_with(
        optimizer,
        inv_scale=scalar(0.25),
        clip_coef=scalar(0.5),
        found_inf=scalar(flag),
        write_grads=write_grads,
    )
    stepped = 0.5 if flag == 0.0 else 1.0
    assert params[0].tolist() == params[1].tolist() == [stepped] * 3
    assert table[1].tolist() == [0.0 if flag == 0.0 else 1.0] * 2
    left = 0.5 if write_grads else 4.0
    assert params[0].grad.tolist() == params[1].grad.tolist() == [left] * 3
    assert table.grad.to_dense()[1].tolist() == [2 * left] * 2


def test_an_amp_step_keeps_one_copy_per_device():
    amp_step = AmpStep(inv_scale=scalar(0.5), clip_value=2.0, write_grads=False)
    here = amp_step.for_device(torch.device("cpu"))
    assert here is amp_step.for_device(torch.device("cpu"))
    assert here.inv_scale is amp_step.inv_scale
    assert (here.found_inf, here.clip_value, here.write_grads) == (None, 2.0, False)
    there = amp_step.for_device(torch.device("meta"))
    assert there.inv_scale.is_meta


def test_skipping_reads_nothing_from_the_device():
    """A meta tensor cannot be read: neither the flag nor a gradient is looked at by the host."""
    params = [torch.nn.Parameter(torch.empty(3, device="meta")) for _ in range(2)]
    for name, (own, _) in PAIRS.items():
        optimizer = own(params, lr=0.1)
        for p in params:
            p.grad = torch.empty_like(p)
        step_with(optimizer, inv_scale=scalar(1.0, "meta"), found_inf=scalar(1.0, "meta"))
        assert optimizer.state.get(params[0], {}).keys() >= ({"step"} if name != "SGD" else set())


@pytest.mark.cuda
@names
def test_no_synchronisation_on_cuda(name):
    params = parameters(device="cuda")
    optimizer = PAIRS[name][0](params, lr=0.1)
    amp_step = {"inv_scale": scalar(0.5, "cuda"), "found_inf": scalar(0.0, "cuda")}
    for p in params:
        p.grad = torch.randn_like(p)
    step_with(optimizer, **amp_step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step_with(optimizer, **amp_step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_gates_on_another_device_are_copied():
    on_gpu, on_cpu = parameters(((4,),), device="cuda") + parameters(((4,),))
    with torch.no_grad():
        on_cpu.copy_(on_gpu)
    optimizer = fastamp.optim.SGD([on_gpu, on_cpu], lr=1.0)
    for flag in (0.0, 1.0):
        for p in (on_gpu, on_cpu):
            p.grad = torch.ones_like(p)
        step_with(optimizer, inv_scale=scalar(0.5, "cuda"), found_inf=scalar(flag, "cuda"))
        assert_same_parameters([on_gpu.cpu()], [on_cpu])


@devices
@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_clip_by_value_comes_after_the_other_factors(device, name, dtype):
    """float64 is stepped by torch behind the same AmpStep."""
    torch.manual_seed(5)
    twins = Twins(name, [{"params": parameters(dtype=dtype, device=device)}], lr=0.1)
    for _ in range(5):
        twins.set_gradients(lambda p: torch.randn_like(p) * 64.0)
        for q in twins.others:
            q.grad.mul_(0.25).mul_(0.5).clamp_(-2.0, 2.0)
        twins.own._fastamp_pending_amp_step = AmpStep(
            scalar(0.25, device), scalar(0.5, device), scalar(0.0, device), clip_value=2.0
        )
        twins.step()
        for p, q in zip(twins.mine, twins.others, strict=True):
            assert_same_bits(p.grad, q.grad)
            assert p.numel() == 0 or p.grad.abs().max() <= 2.0
