# SPDX-License-Identifier: Apache-2.0
"""Gradients and parameters of every sort: what the fused step takes and what it leaves to torch."""

from __future__ import annotations

import warnings
from typing import ClassVar

import pytest
import torch

import fastamp
from support.amp_reference import assert_same_bits
from support.optim_twins import PAIRS, Twins, copies, parameters

names = pytest.mark.parametrize("name", PAIRS)


def sparse(indices, values, shape):
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


@names
def test_without_gradients_nothing_happens(name):
    params = parameters()
    optimizer = PAIRS[name][0](params)
    before = [p.detach().clone() for p in params]
    assert optimizer.step() is None
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert len(optimizer.state) == 0


@names
def test_parameters_without_gradient_keep_value_and_state(name):
    options = {"momentum": 0.9} if name == "SGD" else {}
    twins = Twins(name, [{"params": parameters(((3,),) * 40)}], lr=0.1, **options)
    twins.set_gradients()
    twins.step()
    # Long runs without gradients, then others: state is found whatever its order.
    for absent in (range(30), range(10, 40), range(0, 40, 2), (0,), (39,), range(40)):
        twins.set_gradients(absent=set(absent))
        twins.step()


@names
def test_state_is_found_whatever_its_order(name):
    options = {"momentum": 0.9} if name == "SGD" else {}
    twins = Twins(name, [{"params": parameters(((3,),) * 20)}], lr=0.1, **options)
    for first in (19, 7, 3, 12, 0):  # State is created in this order.
        twins.set_gradients(absent=set(range(20)) - {first})
        twins.step()
    for _ in range(3):
        twins.set_gradients()
        twins.step()


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_steps_sparse_gradients_beside_dense_ones(coalesced, momentum):
    torch.manual_seed(1)
    shapes = ((6, 2), (5,))
    twins = Twins("SGD", [{"params": parameters(shapes)}], lr=0.5, momentum=momentum)
    for _ in range(3):
        gradient = sparse([[4, 1, 4]], torch.randn(3, 2), (6, 2))
        gradient = gradient.coalesce() if coalesced else gradient
        for params in (twins.mine, twins.others):
            params[0].grad = gradient.clone()
            params[1].grad = torch.ones(5)
        twins.own.step()
        twins.torchs.step()
        for p, q in zip(twins.mine, twins.others, strict=True):
            assert_same_bits(p.detach(), q.detach())


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_adam_refuses_sparse_gradients_before_it_changes_anything(name):
    dense, table = parameters(((5,), (6, 2)))
    optimizer = PAIRS[name][0]([dense, table])
    dense.grad = torch.ones(5)
    table.grad = sparse([[1]], torch.ones(1, 2), (6, 2))
    before = dense.detach().clone()
    text = "step: expected dense gradients, got a sparse one: .* consider SparseAdam instead"
    with pytest.raises(RuntimeError, match=text):
        optimizer.step()
    assert torch.equal(dense, before)


@names
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
def test_dtypes_without_a_kernel_are_stepped_by_torch(name, dtype):
    torch.manual_seed(2)
    options = {"momentum": 0.9} if name == "SGD" else {"amsgrad": True}
    params = parameters(((4,), (2, 3)), dtype=dtype) + parameters(((3,),))
    twins = Twins(name, [{"params": params}], lr=0.1, weight_decay=0.1, **options)
    for _ in range(4):
        twins.set_gradients()
        twins.own.step()
        twins.torchs.step()
        for p, q in zip(twins.mine[:2], twins.others[:2], strict=True):
            assert torch.equal(p, q)
        torch.testing.assert_close(twins.mine[2], twins.others[2])
    twin = PAIRS[name][0](copies(params), lr=0.1, weight_decay=0.1, **options)
    twin.load_state_dict(twins.own.state_dict())
    state = twin.state[twin.param_groups[0]["params"][0]]
    assert all(t.dtype in (dtype, torch.float32) for t in state.values())


@names
def test_layouts_of_gradients_and_parameters(name):
    torch.manual_seed(3)
    base = torch.randn(8, 12)
    layouts = {
        "transposed parameter": (torch.randn(6, 8).t(), torch.randn(8, 6)),
        "transposed gradient": (torch.randn(8, 6), torch.randn(6, 8).t()),
        "every second": (base[:, ::2], torch.randn(8, 6)),
        "expanded gradient": (torch.randn(8, 6), torch.randn(6).expand(8, 6)),
        "channels last": (
            torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.randn(2, 3, 4, 4),
        ),
    }
    for text, (weight, gradient) in layouts.items():
        p = torch.nn.Parameter(weight)
        q = torch.nn.Parameter(weight.clone())
        options = {"momentum": 0.9} if name == "SGD" else {}
        own, torchs = (
            cls([t], lr=0.1, **options) for cls, t in zip(PAIRS[name], (p, q), strict=True)
        )
        for _ in range(3):
            p.grad, q.grad = gradient, gradient.clone()
            own.step()
            torchs.step()
        torch.testing.assert_close(p.detach(), q.detach(), msg=text)
        assert torch.equal(p.grad, gradient)


@names
def test_only_the_operand_of_another_layout_is_copied(name):
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    parameter = torch.nn.Parameter(weight)
    optimizer = PAIRS[name][0]([parameter], lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}))
    parameter.grad = torch.randn(2, 3, 4, 4)
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("aten::copy_", 0) == 1  # The gradient; it is not written back.


@names
def test_frozen_integers_and_buffers_without_gradient_do_no_harm(name):
    count = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    (p,) = parameters(((3,),))
    optimizer = PAIRS[name][0]([count, p])
    p.grad = torch.ones(3)
    optimizer.step()
    assert count.tolist() == [0, 1, 2]


@names
def test_shapes_that_do_not_fit_are_refused_before_anything_changes(name):
    options = {"momentum": 0.9} if name == "SGD" else {}
    first, second = parameters(((3,), (4,)))
    optimizer = PAIRS[name][0]([first, second], **options)
    for p in (first, second):
        p.grad = torch.ones_like(p)
    optimizer.step()
    key = "momentum_buffer" if name == "SGD" else "exp_avg"
    optimizer.state[second][key] = torch.zeros(5)
    before = first.detach().clone()
    with pytest.raises(ValueError, match=r"expected .*\[1\] of shape \[4\]"):
        optimizer.step()
    assert torch.equal(first, before)


@names
def test_parameters_listed_twice_are_stepped_as_torch_steps_them(name):
    options = {"momentum": 0.9} if name == "SGD" else {}
    (p,) = parameters(((3,),))
    (q,) = copies([p])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of it when the optimizer is made
        own, torchs = (
            cls([t, t], lr=0.1, **options) for cls, t in zip(PAIRS[name], (p, q), strict=True)
        )
    for _ in range(3):
        p.grad, q.grad = torch.ones(3), torch.ones(3)
        own.step()
        torchs.step()
        torch.testing.assert_close(p.detach(), q.detach())


@names
def test_more_elements_than_32_bits_count(name):
    """On the meta device: everything but the arithmetic, for 3 * 2^30 elements."""
    options = {"momentum": 0.9} if name == "SGD" else {"amsgrad": True}
    big = torch.nn.Parameter(torch.empty(3, 2**30, device="meta", dtype=torch.bfloat16))
    small = torch.nn.Parameter(torch.empty(3, device="meta"))
    optimizer = PAIRS[name][0]([big, small], **options)
    for p in (big, small):
        p.grad = torch.empty_like(p)
    version = big._version
    optimizer.step()
    assert big._version > version
    assert optimizer.state[big]["master_param"].shape == big.shape


def test_subclasses_are_stepped_by_torch_which_asks_them():
    class Logged(torch.Tensor):
        seen: ClassVar[list[str]] = []

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.seen.append(getattr(function, "__name__", str(function)))
            return super().__torch_function__(function, types, args, kwargs or {})

    p = torch.ones(3).as_subclass(Logged).requires_grad_()
    p.grad = torch.ones(3)
    optimizer = fastamp.optim.SGD([p], lr=0.5)
    Logged.seen.clear()
    optimizer.step()
    assert any("add" in name for name in Logged.seen)
    assert p.tolist() == [0.5] * 3


def test_entries_that_are_no_tensors_are_refused():
    optimizer = fastamp.optim.SGD(parameters())
    optimizer.param_groups[0]["params"].append("weight")
    with pytest.raises(TypeError, match=r"step: expected parameters to be torch.Tensor, got str"):
        optimizer.step()


@pytest.mark.parametrize("key", ["lr", "momentum", "params", "differentiable"])
def test_groups_without_an_entry_raise_as_dicts_do(key):
    (p,) = parameters(((3,),))
    p.grad = torch.ones(3)
    optimizer = fastamp.optim.SGD([p])
    del optimizer.param_groups[0][key]
    with pytest.raises(KeyError, match=key):
        optimizer.step()
