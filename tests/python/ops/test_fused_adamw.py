# SPDX-License-Identifier: Apache-2.0
"""fused_adamw_ against torch.optim.Adam and AdamW, step by step, and what it does beyond them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from support.amp_reference import DEVICES, assert_same_bits, unscale_
from support.fused_steps import TORCH_FUSES, FusedAdam, adamw_, assert_same_step

devices = pytest.mark.parametrize("device", DEVICES)
SIZES = (1, 3, 4, 7, 16, 33, 1023, 1024, 1025, 2049)
options = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 0.1),
        "betas": st.tuples(st.floats(0.0, 0.99), st.floats(0.0, 0.9999)),
        "eps": st.sampled_from([1e-8, 1e-6, 1e-3]),
        "weight_decay": st.just(0.0) | st.floats(1e-4, 0.5),
        "decoupled_weight_decay": st.booleans(),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
    }
)


def parameters(sizes, device="cpu", dtype=torch.float32):
    return [torch.randn(n, device=device).to(dtype).requires_grad_() for n in sizes]


def check_equal(own, reference, p, q, before):
    """Moments bit for bit; weights within what torch's square root allows.

    torch takes square roots by MKL, whose results are off by one unit in the last place (2^-23) in
    some 0.6 % of cases; fastamp's are rounded to nearest. Each of the three roundings after it (the
    quotient, the sum with eps, the second quotient) may then fall to the other side: the updates
    differ by at most 4 * 2^-23 of themselves, the weight by one unit more.
    """
    after, was = q.detach().abs(), before.abs()
    bound = 2.0**-21 * (after + was) + 2.0**-23 * after  # after + was >= the update
    bound *= 1 if TORCH_FUSES else 8
    assert ((p.detach() - q.detach()).abs() <= bound).all()
    with torch.no_grad():
        q.copy_(p)  # each step is judged on its own
    state = reference.state[q]
    if not state:
        assert own.steps[p].item() == 0.0
        return
    assert own.steps[p].item() == state["step"].item()
    for mine, name in zip(own.moments[p], ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), strict=True):
        if name in state:
            assert_same_step(mine, state[name])


def follow_torch(groups, steps, overflow=(), clip=1.0, scale=1024.0, device="cpu"):
    """Runs both for some steps; parameters, states and gradients are compared at each."""
    own = FusedAdam(groups)
    torchs = [
        g | {"params": [p.detach().clone().requires_grad_() for p in g["params"]]} for g in groups
    ]
    reference = torch.optim.AdamW(torchs, lr=0.1, foreach=True)
    for group, given_options in zip(reference.param_groups, groups, strict=True):
        group.update({k: v for k, v in given_options.items() if k != "params"})
        if "weight_decay" not in given_options:
            group["weight_decay"] = 0.0
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
        left = [q.grad.clone() for _, q in pairs]
        before = [q.detach().clone() for _, q in pairs]
        if not found_inf.item():
            reference.step()
        clip_coef = torch.tensor(clip, device=device)
        own.step(inv_scale=inv_scale, clip_coef=clip_coef, found_inf=found_inf * 2)
        for (p, q), grad, weight in zip(pairs, left, before, strict=True):
            check_equal(own, reference, p, q, weight)
            assert_same_bits(p.grad, grad)
    return own


@devices
@given(groups=st.lists(options, min_size=1, max_size=4), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_follows_torch_for_all_options(device, groups, seed):
    torch.manual_seed(seed)
    groups = [g | {"params": parameters((5, 1030, 0, 17), device)} for g in groups]
    follow_torch(groups, steps=6, overflow=(0, 3), clip=0.37, device=device)


@devices
def test_follows_torch_for_dozens_of_steps(device):
    torch.manual_seed(1)
    groups = [
        {"params": parameters(SIZES, device), "lr": 0.01, "weight_decay": 0.1},
        {"params": parameters(SIZES, device), "lr": 0.001, "amsgrad": True},
        {"params": [], "lr": 1.0},
        {
            "params": parameters(SIZES, device),
            "lr": 0.003,
            "weight_decay": 0.1,
            "decoupled_weight_decay": False,
            "maximize": True,
        },
    ]
    own = follow_torch(groups, steps=60, overflow=(0, 1, 7, 30, 31), clip=0.5, device=device)
    assert own.steps[groups[0]["params"][0]].item() == 55.0


@devices
@pytest.mark.parametrize("flag", [1.0, 2.0, math.nan])
def test_skipped_steps_change_nothing_but_gradients(device, flag):
    (p,) = parameters((100,), device)
    own = FusedAdam([{"params": [p], "lr": 0.1, "weight_decay": 0.1}])
    p.grad = torch.ones_like(p)
    own.step()
    before = [t.clone() for t in (p.detach(), *own.moments[p], own.steps[p])]
    half = torch.tensor(0.5, device=device)
    own.step(inv_scale=half, found_inf=torch.tensor(flag, device=device))
    after = (p.detach(), *own.moments[p], own.steps[p])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert p.grad.tolist() == [0.5] * 100


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_parameters_follow_their_masters(device, dtype):
    torch.manual_seed(2)
    params = parameters(SIZES, device, dtype)
    single = [p.detach().float().requires_grad_() for p in params]
    own = FusedAdam([{"params": params, "lr": 0.01, "weight_decay": 0.1}])
    reference = FusedAdam([{"params": single, "lr": 0.01, "weight_decay": 0.1}])
    for _ in range(10):
        for p, q in zip(params, single, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        own.step()
        reference.step()
        for p, q in zip(params, single, strict=True):
            assert_same_bits(own.masters[p], q.detach())
            assert_same_bits(p.detach(), q.detach().to(dtype))


@devices
def test_bf16_moments_are_the_rounded_fp32_moments(device):
    (p,) = parameters((3000,), device)
    (q,) = [p.detach().clone().requires_grad_()]
    own = FusedAdam([{"params": [p], "lr": 0.01, "amsgrad": True}], torch.bfloat16)
    single = FusedAdam([{"params": [q], "lr": 0.01, "amsgrad": True}])
    for _ in range(5):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
        own.step()
        single.step()
        assert_same_bits(p.detach(), q.detach())
        for mine, wide in zip(own.moments[p], single.moments[q], strict=True):
            assert_same_bits(mine, wide.bfloat16())
            wide.copy_(mine)  # what the next step starts from


@devices
def test_write_grads_off_and_tensor_rates(device):
    (p,) = parameters((1000,), device)
    q = p.detach().clone().requires_grad_()
    own, other = (
        FusedAdam([{"params": [p], "lr": math.nan}]),
        FusedAdam([{"params": [q], "lr": 0.5}]),
    )
    p.grad, q.grad = torch.randn_like(p), None
    q.grad = p.grad * 0.25
    grad, version = p.grad.clone(), p.grad._version
    rate = torch.tensor(0.5, dtype=torch.float64, device=device)
    own.step([rate], inv_scale=torch.tensor(0.25, device=device), write_grads=False)
    other.step()
    assert torch.equal(p.grad, grad)
    assert p.grad._version == version
    assert_same_bits(p.detach(), q.detach())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_same_bits_for_any_number_of_threads(threads):
    torch.manual_seed(3)
    group = {"params": parameters((200_001, 5, 70_000)), "lr": 0.1, "weight_decay": 0.1}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        follow_torch([group], steps=2)
    finally:
        torch.set_num_threads(before)


@devices
def test_layouts(device):
    weight = torch.randn(8, 6, device=device)
    grad = torch.randn(6, 8, device=device).t()
    p, q = weight.clone(), weight.clone()
    p.grad, q.grad = grad.clone(memory_format=torch.preserve_format), grad.contiguous()
    assert p.grad.stride() != p.stride()
    own, other = FusedAdam([{"params": [p], "lr": 0.1}]), FusedAdam([{"params": [q], "lr": 0.1}])
    half = torch.tensor(0.5, device=device)
    own.step(inv_scale=half)
    other.step(inv_scale=half)
    mine_all = (p, p.grad, *own.moments[p])
    for mine, their in zip(mine_all, (q, q.grad, *other.moments[q]), strict=True):
        assert torch.equal(mine, their)


def small(device="cpu", **group):
    params = [torch.ones(3, 4, device=device), torch.ones(5, device=device).bfloat16()]
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    return FusedAdam([{"params": params, "lr": 0.5, **group}])


@devices
def test_opcheck(device):
    flag = torch.zeros((), device=device)
    amp_step = {"inv_scale": flag + 0.5, "clip_coef": flag + 0.5, "found_inf": flag}
    op = torch.ops.fastamp.fused_adamw_
    arguments = small(device, amsgrad=True).arguments()
    torch.library.opcheck(op, arguments, {**amp_step, "moment_scales": []})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors(device):
    with FakeTensorMode():
        assert adamw_(*small(device).arguments()) is None


def test_versions_of_what_is_written_move():
    arguments = small(amsgrad=True).arguments()
    adamw_(*arguments, inv_scale=torch.tensor(0.5))
    assert all(t._version == 1 for written in arguments[:7] for t in written)


REFUSED = {
    "too few moments": (2, [torch.zeros(3, 4)], ValueError, "expected more than 1 exp_avgs"),
    "moment of another shape": (
        3,
        [torch.zeros(12), torch.zeros(5)],
        ValueError,
        r"expected exp_avg_sqs\[0\] of shape \[3, 4\]",
    ),
    "mixed moments": (
        3,
        [torch.zeros(3, 4).bfloat16(), torch.zeros(5)],
        TypeError,
        r"expected the moments of params\[0\] to have one dtype, got Float and BFloat16",
    ),
    "amsgrad not asked for": (4, [torch.zeros(3, 4)], ValueError, "expected 0 max_exp_avg_sqs"),
    "counter": (5, [torch.zeros(2)] * 2, ValueError, r"state_steps\[0\] to have one element"),
    "no master": (6, [], ValueError, "expected more than 0 masters"),
    "betas": (9, [0.9, 0.9], ValueError, "expected beta1 to have 1 elements"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls_change_nothing(case):
    position, value, error, message = REFUSED[case]
    own = small()
    arguments = list(own.arguments())
    arguments[position] = value
    with pytest.raises(error, match="fused_adamw_: .*" + message):
        adamw_(*arguments)
    for p in own.groups[0]["params"]:
        assert p.eq(1.0).all()
        assert p._version == 0
        assert own.steps[p].item() == 0.0
