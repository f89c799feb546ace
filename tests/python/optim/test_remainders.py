# SPDX-License-Identifier: Apache-2.0
"""Masters in two bytes: what comes back of them, edits, checkpoints, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fastamp
from fastamp import _C
from fastamp._C import AmpStep
from support.amp_reference import DEVICES, assert_same_bits
from support.optim_state import OPTIONS, give_gradients, run, same_state, saved_and_loaded
from support.optim_twins import PAIRS, copies, parameters
from support.ranks import results_of_two_ranks

devices = pytest.mark.parametrize("device", DEVICES)
names = pytest.mark.parametrize("name", PAIRS)
narrow = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
SHAPES = ((3, 5), (0, 4), (17,), (1030,), (70001,))


def make(name, params, **options):
    return PAIRS[name][0](params, **OPTIONS[name] | options)


def bits(t):
    return t.detach().cpu().numpy().view(np.int32).astype(np.int64)


def stored(master, dtype):
    """What a float32 master is kept as: float64 and integers, as docs/optim.md describes it."""
    param = master.to(dtype)
    if dtype is torch.bfloat16:
        gap = bits(master) - bits(param.float())
        return param, torch.from_numpy(np.clip(gap, -32768, 32767).astype(np.int16))
    wide = param.double().numpy()
    unit = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(wide), 2.0**-20))), -14) - 26)
    count = np.rint((master.double().numpy() - wide) / unit)
    return param, torch.from_numpy(np.clip(count, -32767, 32767).astype(np.int16))


@devices
@names
@narrow
def test_each_step_is_that_of_a_float32_master(device, name, dtype):
    """Stepped from the same master, an optimizer with float32 masters says what is to be stored."""
    torch.manual_seed(1)
    params = parameters(SHAPES, dtype=dtype, device=device)
    others = copies(params)
    optimizer, reference = make(name, params, master="remainder"), make(name, others)
    for step in range(12):
        if step:
            for p, q in zip(params, others, strict=True):
                master = optimizer.masters()[p]
                assert_same_bits(p.detach(), master.to(dtype))
                reference.state[q]["master_param"].copy_(master)
                with torch.no_grad():
                    q.copy_(p)
        give_gradients(params, step)
        give_gradients(others, step)
        optimizer.step()
        reference.step()
        for p, q in zip(params, others, strict=True):
            param, remainder = stored(reference.state[q]["master_param"].cpu(), dtype)
            assert_same_bits(p.detach().cpu(), param)
            assert_same_bits(optimizer.state[p]["master_remainder"].cpu(), remainder)
            assert "master_param" not in optimizer.state[p]
            assert all(
                torch.equal(v, reference.state[q][k])
                for k, v in optimizer.state[p].items()
                if k != "master_remainder"
            )


@narrow
def test_small_updates_are_not_lost(dtype):
    p = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
    optimizer = fastamp.optim.SGD([p], lr=1.0, master="remainder")
    for _ in range(100):
        p.grad = torch.full_like(p, 2.0**-14)
        optimizer.step()
    expected = torch.full((1000,), 1 - 100 * 2.0**-14)
    master = optimizer.masters()[p]
    if dtype is torch.float16:
        assert_same_bits(master, expected)
    else:  # It went through two ties, each of which costs at most one unit.
        torch.testing.assert_close(master, expected, rtol=0, atol=2 * 2.0**-24)
    assert_same_bits(p.detach(), master.to(dtype))


def test_float16_weights_of_normal_size_step_as_with_float32_masters():
    torch.manual_seed(2)
    start = torch.rand(5000).add(0.5).half()
    params = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    remainders = fastamp.optim.AdamW([params[0]], lr=1e-3, master="remainder")
    masters = fastamp.optim.AdamW([params[1]], lr=1e-3)
    for step in range(100):
        for p, optimizer in zip(params, (remainders, masters), strict=True):
            give_gradients([p], step)
            optimizer.step()
    assert_same_bits(remainders.masters()[params[0]], masters.state[params[1]]["master_param"])
    assert_same_bits(params[0].detach(), params[1].detach())


@narrow
def test_bytes_per_parameter_of_the_smallest_adamw(dtype):
    p = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
    optimizer = fastamp.optim.AdamW([p], master="remainder", state_dtype=torch.bfloat16)
    run(optimizer, 1)
    kept = {k: v.nbytes for k, v in optimizer.state[p].items()}
    assert kept == {"step": 4, "exp_avg": 2000, "exp_avg_sq": 2000, "master_remainder": 2000}


EDITS = {
    "data": lambda p: p.data.clamp_(-0.25, 0.25),
    "in place": lambda p: p.detach().mul_(1.5),
    "swapped": lambda p: setattr(p, "data", torch.full_like(p, 0.125)),
    "zeroed": lambda p: p.data.zero_(),
    "negative zeros": lambda p: p.data.fill_(-0.0),
}


@devices
@names
@narrow
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_counts_at_once_up_to_half_a_unit(device, name, dtype, edit):
    torch.manual_seed(3)
    params = parameters(SHAPES, dtype=dtype, device=device)
    optimizer = make(name, params, master="remainder")
    run(optimizer, 3)
    for p in params:
        EDITS[edit](p)
    for p, master in optimizer.masters().items():
        size = p.detach().abs()
        unit = torch.nextafter(size, torch.full_like(size, float("inf"))).double() - size.double()
        exact = p.detach().double()
        assert ((master.double() - exact).abs() <= unit / 2).all()
    optimizer.forget_remainders(params[:2])
    for p in params[:2]:
        assert_same_bits(optimizer.masters()[p], p.detach().float())
    assert any(torch.any(optimizer.state[p]["master_remainder"] != 0) for p in params[2:])
    optimizer.forget_remainders()
    before = [p.detach().clone() for p in params]
    run(optimizer, 2, 3)
    for p, was in zip(params, before, strict=True):
        assert torch.isfinite(p).all()
        assert p.numel() == 0 or not torch.equal(p, was)


@narrow
def test_parameters_that_are_not_finite_stay_so(dtype):
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]).to(dtype))
    optimizer = fastamp.optim.SGD([p], lr=0.01, master="remainder")
    run(optimizer, 3)
    p.data[0], p.data[1], p.data[2] = float("inf"), float("nan"), -float("inf")
    run(optimizer, 1)
    assert p[0] == float("inf")
    assert torch.isnan(p[1])
    assert p[2] == -float("inf")
    assert optimizer.state[p]["master_remainder"][:3].tolist() == [0, 0, 0]
    assert torch.isfinite(p[3])


@devices
@names
@narrow
def test_a_resumed_run_continues_bit_for_bit(device, name, dtype):
    torch.manual_seed(4)
    params = parameters(SHAPES, dtype=dtype, device=device)
    whole = make(name, params, master="remainder")
    run(whole, 3)
    weights = copies(params)
    others = parameters(SHAPES, dtype=dtype, device=device)
    resumed = make(name, others, master="remainder")
    resumed.load_state_dict(saved_and_loaded(whole.state_dict()))
    for p, q in zip(others, weights, strict=True):  # After the optimizer.
        p.data.copy_(q.data)
    run(whole, 3, 3)
    run(resumed, 3, 3)
    same_state(whole, resumed)
    for p, q in zip(params, others, strict=True):
        assert_same_bits(p.detach(), q.detach())


@names
@narrow
def test_checkpoints_with_float32_masters_and_remainders_go_both_ways(name, dtype):
    torch.manual_seed(5)
    params = parameters(SHAPES, dtype=dtype)
    before = make(name, params)
    run(before, 3)
    exact = {i: before.state[p]["master_param"].clone() for i, p in enumerate(params)}
    others = copies(params)
    remainders = make(name, others, master="remainder")
    saved = saved_and_loaded(before.state_dict())
    for group in saved["param_groups"]:
        group["master"] = "remainder"
    remainders.load_state_dict(saved)
    for p in others:
        remainders._fastamp_prepare(p, remainders.param_groups[0])
        assert "master_param" not in remainders.state[p]
    for i, p in enumerate(others):
        assert_same_bits(remainders.state[p]["master_remainder"], stored(exact[i], dtype)[1])
        if dtype is torch.float16:
            torch.testing.assert_close(remainders.masters()[p], exact[i], rtol=0, atol=2.0**-40)
    run(remainders, 1, 3)
    joined = remainders.masters()
    back = make(name, copies(others))
    saved = saved_and_loaded(remainders.state_dict())
    for group in saved["param_groups"]:
        group["master"] = "float32"
    back.load_state_dict(saved)
    for p, q in zip(back.masters(), others, strict=True):
        assert_same_bits(back.masters()[p], joined[q])
        back._fastamp_prepare(p, back.param_groups[0])
        assert_same_bits(back.state[p]["master_param"], joined[q])
        assert "master_remainder" not in back.state[p]
    torchs = PAIRS[name][1](copies(others), **OPTIONS[name])
    torchs.load_state_dict(remainders.state_dict())
    run(torchs, 1)


def test_a_master_that_is_not_the_parameters_leaves_no_remainder():
    """An edit between the last step and the change of layout counts, as with float32 masters."""
    p = torch.nn.Parameter(torch.linspace(0.5, 2.0, 500).bfloat16())
    optimizer = fastamp.optim.SGD([p], lr=0.01)
    run(optimizer, 2)
    master = optimizer.state[p]["master_param"].clone()
    with torch.no_grad():
        p[:100].mul_(2.0)
    optimizer.param_groups[0]["master"] = "remainder"
    optimizer._fastamp_prepare(p, optimizer.param_groups[0])
    values = optimizer.masters()[p]
    assert_same_bits(values[:100], p.detach()[:100].float())
    torch.testing.assert_close(values[100:], master[100:], rtol=2.0**-23, atol=0)


def test_remainders_of_transformer_engine_load():
    """It keeps the low 16 bits of a master under the master's name. A parameter is rounded up from
    half a unit on: the parameter's bits, less one if the remainder is negative, are the high half.
    """
    torch.manual_seed(6)
    master = torch.randn(4000)
    master.view(torch.int32)[:50] |= 0x8000
    master.view(torch.int32)[:50] &= ~0x7FFF  # Ties.
    whole = bits(master)
    low = (whole & 0xFFFF).astype(np.uint16).view(np.int16)
    high = ((whole >> 16) + (low < 0)).astype(np.int16)
    p = torch.nn.Parameter(torch.from_numpy(high).view(torch.bfloat16))
    optimizer = fastamp.optim.AdamW([p], lr=0.0, weight_decay=0.0, master="remainder")
    run(optimizer, 1)
    saved = optimizer.state_dict()
    del saved["state"][0]["master_remainder"]
    saved["state"][0]["master_param"] = torch.from_numpy(low)
    p.data = torch.from_numpy(high.copy()).view(torch.bfloat16)
    optimizer.load_state_dict(saved)
    assert_same_bits(optimizer.masters()[p], master)
    run(optimizer, 1)
    assert_same_bits(p.detach(), master.bfloat16())  # From now on to nearest even.


@devices
def test_a_skipped_step_leaves_parameter_and_remainder(device):
    torch.manual_seed(7)
    params = parameters(SHAPES, dtype=torch.bfloat16, device=device)
    optimizer = fastamp.optim.AdamW(params, master="remainder")
    run(optimizer, 2)
    before = [(p.detach().clone(), optimizer.state[p]["master_remainder"].clone()) for p in params]
    give_gradients(params, 9)
    optimizer._fastamp_pending_amp_step = AmpStep(found_inf=torch.ones((), device=device))
    optimizer.step()
    for p, (value, remainder) in zip(params, before, strict=True):
        assert_same_bits(p.detach(), value)
        assert_same_bits(optimizer.state[p]["master_remainder"], remainder)


@devices
def test_arrays_of_other_layouts(device):
    torch.manual_seed(8)
    values = torch.randn(6, 8, device=device).bfloat16()
    params = [torch.nn.Parameter(values.t()), torch.nn.Parameter(values.t().contiguous())]
    results = []
    for p in params:
        optimizer = fastamp.optim.AdamW([p], lr=0.1, master="remainder")
        for step in range(3):
            torch.manual_seed(step)
            p.grad = torch.randn(8, 6, device=device).bfloat16()
            optimizer.step()
        results.append((p.detach(), optimizer.state[p]["master_remainder"]))
    for first, second in zip(*results, strict=True):
        assert_same_bits(first.contiguous(), second.contiguous())


@names
def test_the_option_is_a_groups_own_and_float32_parameters_ignore_it(name):
    first, second = parameters(((9,),), dtype=torch.bfloat16), parameters(((8,),))
    third = parameters(((7,),), dtype=torch.float16)
    groups = [{"params": [*first, *second]}, {"params": third, "master": "float32"}]
    optimizer = make(name, groups, master="remainder")
    run(optimizer, 2)
    assert "master_remainder" in optimizer.state[first[0]]
    assert not {"master_remainder", "master_param"} & set(optimizer.state[second[0]])
    assert "master_param" in optimizer.state[third[0]]
    masters = optimizer.masters()
    assert list(masters) == [*first, *second, *third]
    assert all(m.dtype is torch.float32 and not m.requires_grad for m in masters.values())
    assert masters[second[0]].data_ptr() == second[0].data_ptr()
    assert "master" not in make(name, parameters()).state_dict()["param_groups"][0]


@names
@pytest.mark.parametrize("master", ["half", torch.int16, True])
def test_other_masters_are_refused(name, master):
    with pytest.raises(
        ValueError, match=f"{name}: expected master to be None, 'float32' or 'remainder"
    ):
        make(name, parameters(), master=master)
    optimizer = make(name, parameters())
    with pytest.raises(ValueError, match="add_param_group: expected master to be None"):
        optimizer.add_param_group({"params": parameters(), "master": master})
    assert len(optimizer.param_groups) == 1


@narrow
def test_conversions_have_the_bits_of_the_steps_own(dtype):
    """All parameters with some remainders each; the step reads them with a rate of 0."""
    params = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    params = params[torch.isfinite(params)]
    for remainder in (-32768, -32767, -12345, -1, 0, 1, 9999, 32767):
        p = torch.nn.Parameter(params.clone())
        optimizer = fastamp.optim.SGD([p], lr=0.0, master="remainder")
        p.grad = torch.zeros_like(p)
        optimizer.step()
        remainders = torch.full_like(p, remainder, dtype=torch.int16).detach()
        master = _C.master_from_remainder(p, remainders)
        p.data.copy_(params)
        optimizer.state[p]["master_remainder"].copy_(remainders)
        optimizer.step()
        assert_same_bits(p.detach() + 0.0, master.to(dtype) + 0.0)
        expected = _C.remainder_from_master(p, master)
        kept = p.detach() == master.to(dtype)
        assert kept.all()
        assert_same_bits(optimizer.state[p]["master_remainder"], expected)


def test_conversions_refuse_what_does_not_fit():
    p, remainder = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16)
    for function, arguments, error, text in (
        (
            _C.master_from_remainder,
            (p, remainder.int()),
            TypeError,
            "expected remainder to be Short, got Int",
        ),
        (
            _C.master_from_remainder,
            (p, remainder[:2]),
            ValueError,
            "expected remainder of shape .3., that of",
        ),
        (
            _C.master_from_remainder,
            (p.float(), remainder),
            TypeError,
            "expected param to be Half or BFloat",
        ),
        (_C.remainder_from_master, (p, p), TypeError, "expected master to be Float, got BFloat16"),
        (_C.remainder_from_master, (p, torch.zeros(4)), ValueError, "expected master of shape"),
    ):
        with pytest.raises(error, match=text):
            function(*arguments)


def test_the_op_takes_masters_of_float_and_short_only():
    p = torch.zeros(3, dtype=torch.bfloat16)

    def step(master):
        torch.ops.fastamp.fused_sgd_(
            [p], [torch.ones(3)], [], [], [master], [1], [0.5], [0.0], [0.0], [0.0],
            [False], [False], [], [], [],
        )  # fmt: skip

    step(torch.zeros(3, dtype=torch.int16))
    assert p.tolist() == [-0.5] * 3
    with pytest.raises(TypeError, match=r"expected masters\[0\] to be Float or Short, got Int"):
        step(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"expected masters\[0\] of shape \[3\]"):
        step(torch.zeros(4, dtype=torch.int16))


def shards(_):
    """A sharded model beside the whole one, and its masters gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(9)
    mesh = init_device_mesh("cpu", (2,))
    start = torch.randn(7, 5).bfloat16()
    p = torch.nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))
    q = torch.nn.Parameter(start.clone())
    options = {"lr": 0.01, "master": "remainder", "state_dtype": torch.bfloat16}
    sharded, whole = (fastamp.optim.AdamW([x], **options) for x in (p, q))
    for _ in range(4):
        q.grad = torch.randn(7, 5).bfloat16()
        p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
        sharded.step()
        whole.step()
    saved = saved_and_loaded(whole.state_dict())
    gathered = sharded.masters()[p].full_tensor()
    remainders = sharded.state[p]["master_remainder"]  # gloo gathers no int16
    expected = saved["state"][0]["master_remainder"].chunk(2)[dist.get_rank()]
    return gathered, whole.masters()[q], remainders.to_local().clone(), expected.clone()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    yield from results_of_two_ranks(shards, tmp_path_factory)


def test_remainders_of_shards_are_shards(ranks):
    for gathered, whole, remainders, expected in ranks:
        assert_same_bits(gathered, whole)
        assert_same_bits(remainders, expected)
