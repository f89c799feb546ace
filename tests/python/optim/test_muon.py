# SPDX-License-Identifier: Apache-2.0
"""fastamp.optim.Muon against torch.optim.Muon: steps, options, state, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import fastamp.optim
from support.fused_steps import assert_same_step
from support.muon_reference import MuonTwins, assert_close, matrices

OPTIONS = {
    "defaults": {},
    "plain momentum": {"nesterov": False, "momentum": 0.9},
    "no decay": {"lr": 0.05, "weight_decay": 0.0},
    "AdamW's rates": {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.3},
    "no momentum": {"momentum": 0.0, "adjust_lr_fn": "original"},
    "a rate in a tensor": {"lr": torch.tensor(0.02)},
    "another iteration": {"ns_steps": 3, "eps": 1e-3, "ns_coefficients": (3.0, -3.2, 1.2)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_are_torchs(options):
    torch.manual_seed(1)
    twins = MuonTwins([{"params": matrices()}], **options)
    for step in range(5):
        twins.set_gradients(absent={step} if step < 3 else ())
        twins.step()


def test_without_products_all_bits_are_torchs():
    """Momentum, normalization, decay and rate; the products between them are a library's."""
    torch.manual_seed(2)
    twins = MuonTwins([{"params": matrices()}], lr=0.1, ns_steps=0, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        twins.set_gradients()
        twins.own.step()
        twins.torchs.step()
        for p, q in zip(twins.mine, twins.others, strict=True):
            assert_same_step(p.detach(), q.detach())


def test_groups_schedules_and_edits_between_steps():
    torch.manual_seed(3)
    groups = [{"params": matrices()}, {"params": matrices(), "lr": 0.3, "nesterov": False}]
    twins = MuonTwins(groups, lr=0.1)
    schedules = [CosineAnnealingLR(each, 10) for each in (twins.own, twins.torchs)]
    for step in range(8):
        if step == 3:
            for each in (twins.own, twins.torchs):
                each.param_groups[0]["weight_decay"] = 0.3
                each.param_groups[1]["adjust_lr_fn"] = "match_rms_adamw"
        twins.set_gradients()
        twins.step()
        for schedule in schedules:
            schedule.step()
    assert twins.own.param_groups[0]["lr"] == twins.torchs.param_groups[0]["lr"] < 0.1


def test_a_batch_of_equal_shapes_steps_as_its_matrices_one_by_one():
    torch.manual_seed(4)
    shapes = [(24, 40)] * 5 + [(40, 24)] * 5
    together = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in together]
    batch = fastamp.optim.Muon(together, lr=0.1)
    single = [fastamp.optim.Muon([p], lr=0.1) for p in alone]
    for _ in range(3):
        for p, q in zip(together, alone, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        batch.step()
        for optimizer in single:
            optimizer.step()
    for p, q in zip(together, alone, strict=True):
        assert_close(p, q, 0.1 * math.sqrt(40 / 24))


def test_batches_of_many_elements_are_stepped_in_waves():
    """Two matrices are more than a wave takes at a time."""
    rows, columns = 32, 1 << 19
    params = [torch.nn.Parameter(torch.zeros(rows, columns)) for _ in range(3)]
    optimizer = fastamp.optim.Muon(params, lr=1.0, momentum=0.0, ns_steps=0, weight_decay=0.0)
    for i, p in enumerate(params):
        p.grad = torch.zeros_like(p)
        p.grad[i, i] = 7.0
    optimizer.step()
    for i, p in enumerate(params):
        assert p[i, i].item() == -1.0
        assert p.count_nonzero() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1e-7, 1.0, 1e6])
def test_every_dtype_of_the_iteration_takes_gradients_of_any_size(dtype, size):
    torch.manual_seed(5)
    p = torch.nn.Parameter(torch.zeros(12, 30))
    optimizer = fastamp.optim.Muon([p], lr=1.0, ns_dtype=dtype, eps=1e-12)
    p.grad = torch.randn(12, 30) * size
    optimizer.step()
    values = torch.linalg.svdvals(p.detach())
    assert 0.5 < values.min() <= values.max() < 1.4


def test_a_region_does_not_change_the_iteration():
    torch.manual_seed(6)
    p = torch.nn.Parameter(torch.randn(8, 12))
    q = torch.nn.Parameter(p.detach().clone())
    p.grad = torch.randn_like(p)
    q.grad = p.grad.clone()
    fastamp.optim.Muon([p], ns_dtype=torch.float32).step()
    with fastamp.autocast("cpu", dtype=torch.bfloat16):
        fastamp.optim.Muon([q], ns_dtype=torch.float32).step()
    assert torch.equal(p, q)


def test_defaults_groups_and_class_are_torchs():
    twins = MuonTwins([{"params": matrices()}])
    assert twins.own.defaults == twins.torchs.defaults
    assert list(twins.own.param_groups[0]) == list(twins.torchs.param_groups[0])
    assert repr(twins.own) == repr(twins.torchs)
    assert isinstance(twins.own, torch.optim.Muon)


@pytest.mark.parametrize("from_torch", [True, False])
def test_checkpoints_go_both_ways(from_torch):
    torch.manual_seed(7)
    twins = MuonTwins([{"params": matrices()}], lr=0.1)
    for _ in range(2):
        twins.set_gradients()
        twins.step()
    first, other = (twins.torchs, "own") if from_torch else (twins.own, "torchs")
    getattr(twins, other).load_state_dict(copy.deepcopy(first.state_dict()))
    for state in twins.own.state.values():
        assert list(state) == ["momentum_buffer"]
    twins.set_gradients()
    twins.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("master", ["float32", "remainder"])
@pytest.mark.parametrize("how", ["state_dict", "pickle"])
def test_a_resumed_run_has_the_same_bits(dtype, master, how):
    torch.manual_seed(8)
    params = matrices(dtype=dtype)
    optimizer = fastamp.optim.Muon(params, lr=0.02, master=master, state_dtype=torch.bfloat16)
    gradients = [[torch.randn_like(p) for p in params] for _ in range(5)]

    def run(steps):
        for step in steps:
            params_now = optimizer.param_groups[0]["params"]
            for p, gradient in zip(params_now, gradients[step], strict=True):
                p.grad = gradient.clone()
            optimizer.step()

    run(range(2))
    if how == "pickle":
        saved = pickle.dumps(optimizer)
    else:
        saved = copy.deepcopy((optimizer.state_dict(), [p.detach() for p in params]))
    run(range(2, 5))
    if how == "pickle":
        optimizer = pickle.loads(saved)
    else:
        again = [torch.nn.Parameter(p) for p in saved[1]]
        optimizer = fastamp.optim.Muon(again, master=master)
        optimizer.load_state_dict(saved[0])
    run(range(2, 5))
    for p, q in zip(params, optimizer.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)
    for state in optimizer.state.values():
        assert state["momentum_buffer"].dtype == torch.bfloat16


def test_portable_checkpoints_have_torchs_layout():
    params = matrices(dtype=torch.bfloat16)
    options = {"ns_dtype": torch.float16, "state_dtype": torch.bfloat16, "master": "remainder"}
    optimizer = fastamp.optim.Muon(params, **options)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    saved = optimizer.state_dict(portable=True)
    torchs = torch.optim.Muon([torch.nn.Parameter(p.detach().float()) for p in params])
    assert set(saved["param_groups"][0]) == set(torchs.state_dict()["param_groups"][0])
    assert all(list(state) == ["momentum_buffer"] for state in saved["state"].values())
    torchs.load_state_dict(saved)


def test_fuse_turns_torchs_into_fastamps():
    torch.manual_seed(9)
    twins = MuonTwins([{"params": matrices()}], lr=0.1)
    twins.set_gradients()
    twins.step()
    fused = torch.optim.Muon(twins.others, lr=0.1)
    fused.load_state_dict(twins.torchs.state_dict())
    schedule = CosineAnnealingLR(fused, 5)
    assert fastamp.optim.fuse_(fused) is fused
    assert type(fused) is fastamp.optim.Muon
    twins.set_gradients()
    twins.own.step()
    fused.step()
    schedule.step()
    for p, q in zip(twins.mine, twins.others, strict=True):
        assert torch.equal(p, q)


def test_float64_is_stepped_by_torch():
    torch.manual_seed(10)
    p = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    q = torch.nn.Parameter(p.detach().clone())
    p.grad = torch.randn_like(p)
    q.grad = p.grad.clone()
    fastamp.optim.Muon([p], lr=0.1).step()
    torch.optim.Muon([q], lr=0.1).step()
    assert torch.equal(p, q)


def refused(params, error, message, **options):
    before = [p.detach().clone() for p in params]
    with pytest.raises(error, match=message):
        fastamp.optim.Muon(params, **options).step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


def with_gradient(tensor, grad=None):
    p = torch.nn.Parameter(tensor)
    p.grad = torch.ones_like(tensor) if grad is None else grad
    return p


def test_what_does_not_fit_is_refused_and_nothing_changes():
    matrix = with_gradient(torch.ones(2, 3))
    message = "Muon only supports 2D parameters"
    for shape in ((3,), (), (2, 3, 4)):
        refused([matrix, with_gradient(torch.ones(shape))], ValueError, message)
    optimizer = fastamp.optim.Muon([matrix])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1
    sparse = torch.sparse_coo_tensor([[0], [0]], [1.0], (2, 3), check_invariants=True)
    refused([matrix, with_gradient(torch.ones(2, 3), sparse)], RuntimeError, "sparse gradients")
    turned = with_gradient(torch.ones(2, 3, dtype=torch.complex64))
    refused([matrix, turned], RuntimeError, "does not support complex parameters")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Learning rate should be >= 0"),
        ({"momentum": -1.0}, "momentum should be >= 0"),
        ({"weight_decay": -1.0}, "weight decay should be >= 0"),
        ({"adjust_lr_fn": "none"}, "is not supported"),
        ({"ns_dtype": torch.float64}, "Muon: expected ns_dtype to be None"),
        ({"state_dtype": torch.float16}, "Muon: expected state_dtype to be None"),
        ({"master": "int8"}, "Muon: expected master to be None"),
        ({"autocast_dtype": torch.float64}, "Muon: expected autocast_dtype to be None"),
        ({"ns_steps": 100}, "Number of steps must be less than 100"),
        ({"ns_coefficients": (1.0, 2.0)}, "exactly 3 values"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    refused([with_gradient(torch.ones(2, 3))], ValueError, message, **options)


def test_a_checkpoint_of_another_layout_is_refused_and_nothing_changes():
    p = with_gradient(torch.ones(2, 3))
    optimizer = fastamp.optim.Muon([p], lr=0.25)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    other = torch.nn.Parameter(torch.ones(3, 2))
    other.grad = torch.ones(3, 2)
    turned = fastamp.optim.Muon([other])
    turned.step()
    adamw = fastamp.optim.AdamW([p])
    with pytest.raises(ValueError, match="expected momentum_buffer of shape"):
        optimizer.load_state_dict(turned.state_dict())
    with pytest.raises(ValueError, match="expected the state of a Muon"):
        optimizer.load_state_dict(adamw.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert torch.equal(after["state"][0]["momentum_buffer"], before["state"][0]["momentum_buffer"])
