# SPDX-License-Identifier: Apache-2.0
"""fused_sgd_ against torch.optim.SGD, step by step, and what it does beyond it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.amp_reference import DEVICES, assert_same_bits, unscale_
from support.fused_steps import FusedSgd, assert_same_step, sgd_

devices = pytest.mark.parametrize("device", DEVICES)
SIZES = (1, 3, 4, 7, 16, 33, 1023, 1024, 1025, 2049)
options = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 1.0),
        "momentum": st.just(0.0) | st.floats(0.1, 0.99),
        "dampening": st.just(0.0) | st.floats(0.0, 0.9),
        "weight_decay": st.just(0.0) | st.floats(1e-4, 0.5),
        "maximize": st.booleans(),
        "nesterov": st.booleans(),
    }
)


def valid(group):
    """torch allows nesterov with momentum and no dampening only."""
    if group["nesterov"] and group["momentum"] == 0.0:
        group["nesterov"] = False
    return group | ({"dampening": 0.0} if group["nesterov"] else {})


def parameters(sizes, device="cpu", dtype=torch.float32):
    return [torch.randn(n, device=device).to(dtype).requires_grad_() for n in sizes]


def twins(groups):
    copies = [[p.detach().clone().requires_grad_() for p in g["params"]] for g in groups]
    return [g | {"params": ps} for g, ps in zip(groups, copies, strict=True)]


def follow_torch(
    groups, steps, overflow=(), clip=1.0, scale=1024.0, device="cpu", clip_value=None, **call
):
    """Runs both for some steps; parameters, buffers and gradients are compared at each."""
    own, torchs = FusedSgd(groups), twins(groups)
    reference = torch.optim.SGD(torchs, lr=0.1, foreach=True)
    pairs = [
        (p, q)
        for g, h in zip(groups, torchs, strict=True)
        for p, q in zip(g["params"], h["params"], strict=True)
    ]
    for step in range(steps):
        for p, q in pairs:
            p.grad = torch.randn_like(p) * scale
            if step in overflow and p.numel():
                p.grad.view(-1)[-1] = math.inf
            q.grad = p.grad.clone()
        inv_scale = torch.tensor(1 / scale, device=device)
        found_inf = torch.zeros((), device=device)
        unscale_([q.grad for _, q in pairs], inv_scale, found_inf)
        for _, q in pairs:
            q.grad.mul_(clip)
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_([q for _, q in pairs], clip_value)
            call["clip_value"] = clip_value
        # Before the step: with nesterov torch's foreach implementation adds to the gradients.
        left = [q.grad.clone() for _, q in pairs]
        if not found_inf.item():
            reference.step()
        clip_coef = torch.tensor(clip, device=device)
        own.step(inv_scale=inv_scale, clip_coef=clip_coef, found_inf=found_inf * 2, **call)
        for (p, q), grad in zip(pairs, left, strict=True):
            assert_same_step(p.detach(), q.detach())
            assert_same_bits(p.grad, grad)
            buffer = reference.state[q].get("momentum_buffer")
            if buffer is not None:
                assert_same_step(own.buffers[p], buffer)
            else:
                assert own.buffers[p].isnan().all()
    return own


@devices
@given(
    groups=st.lists(options, min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    clip=st.sampled_from([1.0, 0.37, math.nan]),
    clip_value=st.none() | st.sampled_from([0.25, 1e-3, math.inf]),
)
@settings(max_examples=40, deadline=None)
def test_follows_torch_for_all_options(device, groups, seed, clip, clip_value):
    torch.manual_seed(seed)
    groups = [valid(g) | {"params": parameters((5, 1030, 0, 17), device)} for g in groups]
    overflow = range(6) if math.isnan(clip) else (0, 3)  # a NaN comes from an overflow only
    follow_torch(groups, 6, overflow, clip, device=device, clip_value=clip_value)


@devices
def test_follows_torch_for_dozens_of_steps(device):
    torch.manual_seed(1)
    groups = [
        {"params": parameters(SIZES, device), "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
        {"params": parameters(SIZES, device), "lr": 0.5},
        {"params": [], "lr": 1.0},
        {"params": parameters(SIZES, device), "lr": 0.1, "momentum": 0.8, "nesterov": True},
        {"params": parameters(SIZES, device), "lr": 0.1, "momentum": 0.8, "dampening": 0.3},
    ]
    own = follow_torch(groups, steps=60, overflow=(0, 1, 7, 30, 31), clip=0.5, device=device)
    assert own.steps[groups[0]["params"][0]].item() == 55.0


@devices
def test_first_step_after_a_skipped_first_step_starts_the_buffer(device):
    (p,) = parameters((10,), device)
    own = FusedSgd([{"params": [p], "lr": 0.1, "momentum": 0.9, "dampening": 0.5}])
    before = p.detach().clone()
    for flag in (1.0, 2.0, math.nan, -1.0):
        p.grad = torch.ones_like(p)
        own.step(found_inf=torch.tensor(flag, device=device))
        assert torch.equal(p.detach(), before)
        assert own.buffers[p].isnan().all()
        assert own.steps[p].item() == 0.0
    own.step(found_inf=torch.tensor(0.0, device=device))
    assert own.buffers[p].tolist() == [1.0] * 10  # no dampening at the first step
    assert own.steps[p].item() == 1.0


@devices
def test_write_grads_off_leaves_gradients_alone(device):
    (p,) = parameters((1000,), device)
    (q,) = [p.detach().clone()]
    own = FusedSgd([{"params": [p], "lr": 0.5}])
    p.grad = torch.randn_like(p)
    grad, version = p.grad.clone(), p.grad._version
    own.step(inv_scale=torch.tensor(0.25, device=device), write_grads=False)
    assert torch.equal(p.grad, grad)
    assert p.grad._version == version
    assert_same_step(p.detach(), q.add(grad * 0.25, alpha=-0.5))


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_parameters_follow_their_masters(device, dtype):
    torch.manual_seed(2)
    params = parameters(SIZES, device, dtype)
    single = [p.detach().float().requires_grad_() for p in params]
    own = FusedSgd([{"params": params, "lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}])
    reference = torch.optim.SGD(single, lr=0.01, momentum=0.9, weight_decay=0.1, foreach=True)
    for _ in range(20):
        for p, q in zip(params, single, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        own.step()
        reference.step()
        for p, q in zip(params, single, strict=True):
            assert_same_step(own.masters[p], q.detach())
            assert_same_bits(p.detach(), own.masters[p].to(dtype))


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_gradients_of_fp32_parameters(device, dtype):
    (p,) = parameters((3000,), device)
    q = p.detach().clone()
    grad = (torch.randn(3000, device=device) * 100).to(dtype)
    own = FusedSgd([{"params": [p], "lr": 0.25}])
    arguments = list(own.arguments())
    arguments[1] = [grad.clone()]
    sgd_(*arguments, inv_scale=torch.tensor(0.3, device=device))
    unscaled = grad.float() * torch.tensor(0.3, device=device)
    assert_same_step(p.detach(), q.add(unscaled, alpha=-0.25))
    assert_same_bits(arguments[1][0], unscaled.to(dtype))


@devices
def test_bf16_momentum_is_the_rounded_fp32_momentum(device):
    (p,) = parameters((3000,), device)
    own = FusedSgd([{"params": [p], "lr": 0.25, "momentum": 0.9}], torch.bfloat16)
    buffer = None
    for _ in range(5):
        p.grad = torch.randn_like(p)
        own.step()
        moved = p.grad if buffer is None else buffer.float().mul(0.9).add_(p.grad)
        buffer = moved.to(torch.bfloat16)
        assert_same_step(own.buffers[p].float(), buffer.float())


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lr_device", ["cpu", "same"])
def test_tensor_learning_rates(device, dtype, lr_device):
    rates = [0.1, 0.02]
    groups = [{"params": parameters((40,), device), "lr": r} for r in rates]
    others = twins(groups)
    home = device if lr_device == "same" else "cpu"
    tensors = [torch.tensor(r, dtype=dtype, device=home) for r in rates]
    for group, other, tensor in zip(groups, others, tensors, strict=True):
        group["params"][0].grad = torch.randn(40, device=device)
        other["params"][0].grad = group["params"][0].grad.clone()
        group["lr"] = math.nan  # not read
        other["lr"] = tensor.item()
    FusedSgd(groups).step(tensors)
    FusedSgd(others).step()
    for group, other in zip(groups, others, strict=True):
        assert_same_bits(group["params"][0].detach(), other["params"][0].detach())


@devices
def test_more_groups_than_one_launch_holds(device):
    groups = [{"params": parameters((i % 5,), device), "lr": 0.01 * i} for i in range(1, 101)]
    follow_torch(groups, steps=2, device=device)


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_clamping_comes_after_unscaling_and_clipping(device, dtype):
    (p,) = parameters((3000,), device)
    grad = (torch.randn(3000, device=device) * 100).to(dtype)
    amp_step = {"inv_scale": torch.tensor(0.5, device=device), "clip_coef": torch.tensor(0.1)}
    amp_step["clip_coef"] = amp_step["clip_coef"].to(device)
    expected = (grad.float() * 0.5 * amp_step["clip_coef"]).clamp(-3.1, 3.1)
    q = p.detach().add(expected, alpha=-0.25)
    own = FusedSgd([{"params": [p], "lr": 0.25}])
    for write in (False, True):
        arguments = list(own.arguments())
        arguments[1] = [grad.clone()]
        before = p.detach().clone()
        sgd_(*arguments, **amp_step, clip_value=3.1, write_grads=write)
        assert_same_step(p.detach(), q)
        assert_same_bits(arguments[1][0], expected.to(dtype) if write else grad)
        with torch.no_grad():
            p.copy_(before)


@devices
def test_layouts(device):
    base = torch.randn(8, 6, device=device)
    weights = {
        "both transposed": (base.t().detach(), torch.randn(8, 6, device=device).t()),
        "gradient transposed": (base.clone(), torch.randn(6, 8, device=device).t()),
        "every second": (torch.randn(8, 12, device=device)[:, ::2], torch.randn(8, 6).to(device)),
        "offset": (torch.randn(49, device=device)[1:].view(8, 6), torch.randn(8, 6).to(device)),
        "channels last": (
            torch.randn(2, 3, 4, 4, device=device).to(memory_format=torch.channels_last),
            torch.randn(2, 3, 4, 4, device=device),
        ),
    }
    for name, (weight, grad) in weights.items():
        p, q = weight.detach(), weight.detach().clone()
        own = FusedSgd([{"params": [p], "lr": 0.5, "momentum": 0.9}])
        p.grad = grad
        raw = grad.clone()
        for _ in range(2):
            own.step(inv_scale=torch.tensor(0.5, device=device))
        expected = raw * 0.5
        assert torch.equal(grad, raw * 0.25), name
        buffer = expected * torch.tensor(0.9, device=device) + raw * 0.25
        q.add_(expected, alpha=-0.5).add_(buffer, alpha=-0.5)
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_same_bits_for_any_number_of_threads(threads):
    torch.manual_seed(3)
    group = {"params": parameters((200_001, 5, 70_000)), "lr": 0.1, "momentum": 0.9}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        follow_torch([group], steps=3)
    finally:
        torch.set_num_threads(before)
