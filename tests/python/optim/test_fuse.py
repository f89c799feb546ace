# SPDX-License-Identifier: Apache-2.0
"""fuse_: torch's optimizers that exist already, carried by the fused step."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import fastamp
from fastamp._C import AmpStep
from fastamp.optim import fuse_
from support.amp_reference import assert_same_bits
from support.amp_step_pairs import supports_amp_step
from support.optim_twins import PAIRS, Twins, assert_same_parameters, copies, parameters

names = pytest.mark.parametrize("name", PAIRS)
OPTIONS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.2},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
}


def torch_pair(name, dtype=torch.float32, **options):
    """Two equal optimizers of torch's, with their parameters."""
    params = parameters(dtype=dtype)
    others = copies(params)
    cls = PAIRS[name][1]
    options = OPTIONS[name] | options
    return params, cls(params, **options), others, cls(others, **options)


def step(optimizer, params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    return optimizer.step()


def skip(optimizer, params):
    """A step behind a raised flag; True if nothing but the flag was needed to skip it."""
    before = [p.detach().clone() for p in params]
    optimizer._fastamp_pending_amp_step = AmpStep(found_inf=torch.ones(()))
    optimizer.step()
    assert "_fastamp_pending_amp_step" not in optimizer.__dict__
    return all(torch.equal(p.detach(), q) for p, q in zip(params, before, strict=True))


@names
@pytest.mark.parametrize("fused", [None, True])
def test_a_fused_optimizer_goes_on_where_torchs_was(name, fused):
    torch.manual_seed(1)
    params, optimizer, others, reference = torch_pair(name, fused=fused)
    for i in range(3):
        step(optimizer, params, i)
        step(reference, others, i)
    assert fuse_(optimizer) is optimizer
    assert supports_amp_step(optimizer)
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)
    for i in range(3, 30):
        step(optimizer, params, i)
        step(reference, others, i)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
    assert skip(optimizer, params)


@names
def test_one_step_after_fusing_is_one_step_of_torchs(name):
    torch.manual_seed(2)
    twins = Twins(name, [{"params": parameters()}], **OPTIONS[name])
    params, optimizer, _, _ = torch_pair(name)
    for i in range(2):
        step(optimizer, params, i)
    twins.mine, twins.own = params, optimizer
    with torch.no_grad():
        for p, q in zip(params, twins.others, strict=True):
            q.copy_(p)
    twins.torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fuse_(optimizer)
    for _ in range(5):
        twins.set_gradients()
        twins.step()


@names
def test_state_takes_torchs_fused_layout_and_goes_back(name):
    params, optimizer, others, reference = torch_pair(name)
    for i in range(2):
        step(optimizer, params, i)
        step(reference, others, i)
    fuse_(optimizer)
    for p, q in zip(params, others, strict=True):
        for key, value in reference.state[q].items():
            got = optimizer.state[p][key]
            assert (got.dtype, got.device) == (torch.float32, p.device)
            assert_same_bits(got, value)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(optimizer, params, 5)
    step(reference, others, 5)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)


@names
def test_fusing_twice_is_fusing_once(name):
    params, optimizer, _, _ = torch_pair(name)
    fuse_(optimizer)
    step(optimizer, params, 0)
    state = {p: dict(optimizer.state[p]) for p in params}
    assert fuse_(optimizer) is optimizer
    assert all(optimizer.state[p][k] is state[p][k] for p in params for k in state[p])
    own = PAIRS[name][0](params)
    assert fuse_(own) is own


@names
@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_made_before_and_after_go_on(name, when):
    torch.manual_seed(3)
    params, optimizer, others, reference = torch_pair(name)

    def schedule(opt):
        return torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)

    if when == "before":
        scheduler = schedule(optimizer)
        patched = optimizer.__dict__["step"]
        fuse_(optimizer)
        assert optimizer.__dict__["step"] is patched
    else:
        scheduler = schedule(fuse_(optimizer))
    other = schedule(reference)
    for i in range(8):
        step(optimizer, params, i)
        scheduler.step()
        step(reference, others, i)
        other.step()
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
    assert optimizer._opt_called
    assert skip(optimizer, params)


@names
@pytest.mark.parametrize("scheduled", [False, True])
def test_hooks_and_closures_go_on_once_each(name, scheduled):
    params, optimizer, _, _ = torch_pair(name)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fuse_(optimizer)
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))

    def closure():
        seen.append(torch.is_grad_enabled())
        for p in params:
            p.grad = torch.ones_like(p)
        return 7.0

    before = [p.detach().clone() for p in params]
    assert optimizer.step(closure) == 7.0
    assert seen == ["pre", True, "post"]
    assert all(not torch.equal(p, q) for p, q in zip(params, before, strict=True) if p.numel() > 0)


def test_a_step_patched_on_the_instance_goes_on():
    """As Accelerate does to notice skipped steps."""
    params, optimizer, _, _ = torch_pair("SGD")
    calls = []
    original = optimizer.step

    def patched(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    optimizer.step = patched
    fuse_(optimizer)
    step(optimizer, params, 0)
    assert skip(optimizer, params)
    assert calls == [(), ()]


@names
def test_groups_are_the_same_objects(name):
    params, optimizer, _, _ = torch_pair(name)
    groups, before = list(optimizer.param_groups), copy.deepcopy(optimizer.state_dict())
    fuse_(optimizer)
    assert all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True))
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    optimizer.add_param_group({"params": parameters(), "lr": 0.5})
    step(optimizer, params, 0)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


@names
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_parameters_get_masters(name, dtype):
    params, optimizer, _, _ = torch_pair(name, dtype=dtype)
    step(optimizer, params, 0)
    fuse_(optimizer)
    masters = [p.detach().float() for p in params]
    step(optimizer, params, 1)
    for p, before in zip(params, masters, strict=True):
        master = optimizer.state[p]["master_param"]
        assert master.dtype == torch.float32
        assert_same_bits(p.detach(), master.to(dtype))
        assert p.numel() == 0 or not torch.equal(master, before)


@names
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_a_fused_optimizer_are_fused(name, way):
    params, optimizer, _, _ = torch_pair(name)
    step(fuse_(optimizer), params, 0)
    twin = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    others = twin.param_groups[0]["params"]
    step(optimizer, params, 1)
    step(twin, others, 1)
    assert supports_amp_step(twin)
    assert_same_parameters(params, others)


def test_other_classes_are_refused_and_left_alone():
    class Mine(torch.optim.SGD):
        pass

    params = parameters()
    for optimizer, text in (
        (Mine(params), r"got .*Mine"),
        (torch.optim.RMSprop(params), "got torch.optim.rmsprop.RMSprop"),
        (torch.optim.NAdam(params), "got torch.optim.nadam.NAdam"),
        ([], "got builtins.list"),
        (None, "got builtins.NoneType"),
    ):
        before = type(optimizer)
        with pytest.raises(
            TypeError, match="fuse_: expected an object of exactly torch.optim.SGD.*" + text
        ):
            fuse_(optimizer)
        assert type(optimizer) is before


@names
def test_other_optimizers_of_the_class_are_not_touched(name):
    params, optimizer, others, reference = torch_pair(name)
    fuse_(optimizer)
    assert type(reference) is PAIRS[name][1]
    step(reference, others, 0)
    assert "momentum_steps" not in reference.state[others[0]]
    assert isinstance(optimizer, PAIRS[name][1])
    assert type(optimizer) is getattr(fastamp.optim, name)
    step(optimizer, params, 0)
