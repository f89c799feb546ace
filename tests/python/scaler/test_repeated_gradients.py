# SPDX-License-Identifier: Apache-2.0
"""Gradients that come twice: parameters listed twice, parameters that share a gradient."""

import warnings

import pytest
import torch

import fastamp
from support.scaler_steps import INF

KINDS = pytest.mark.parametrize(
    "kind", [torch.optim.SGD, fastamp.optim.SGD], ids=["torch", "fused"]
)


def optimizer_over(kind, parameters, lr=1.0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of parameters that are listed twice.
        return kind(parameters, lr=lr)


def parameter_with(gradient, size=2, dtype=torch.float32):
    parameter = torch.nn.Parameter(torch.ones(size, dtype=dtype))
    parameter.grad = torch.full((size,), float(gradient), dtype=dtype)
    return parameter


def started(**options):
    scaler = fastamp.GradScaler("cpu", init_scale=4.0, **options)
    scaler.scale(torch.ones(()))
    return scaler


@KINDS
@pytest.mark.parametrize("count", [1, 40, 300])
@pytest.mark.parametrize("first", [0, 17])
def test_a_parameter_listed_twice_is_unscaled_once(kind, count, first):
    parameters = [parameter_with(4.0 * (i + 1)) for i in range(count)]
    first = min(first, count - 1)
    scaler = started()
    scaler.unscale_(optimizer_over(kind, [*parameters, parameters[first], parameters[first]]))
    assert [p.grad.tolist() for p in parameters] == [[i + 1.0] * 2 for i in range(count)]


@KINDS
@pytest.mark.parametrize("held", ["all", "some", "looked at", "some looked at", "none"])
def test_whoever_else_holds_gradients_makes_no_difference(kind, held):
    parameters = [parameter_with(4.0 * i) for i in range(100)]
    if "looked" in held:  # Python objects without a holder.
        [p.grad for p in parameters[:: 3 if "some" in held else 1]]
    kept = {"all": parameters, "some": parameters[::3]}.get(held, [])
    views = [p.grad.view(-1).view(-1) for p in kept], [p.grad for p in kept]
    scaler = started()
    scaler.unscale_(optimizer_over(kind, [*parameters, parameters[50]]))
    assert [p.grad.tolist() for p in parameters] == [[float(i)] * 2 for i in range(100)]
    del views


@KINDS
def test_a_parameter_of_two_groups_is_unscaled_once(kind):
    first, second = parameter_with(4.0), parameter_with(8.0)
    optimizer = kind([first], lr=1.0)
    optimizer.param_groups[0]["params"].append(second)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [second]})
    scaler = started()
    scaler.unscale_(optimizer)
    assert (first.grad.tolist(), second.grad.tolist()) == ([1.0] * 2, [2.0] * 2)


@KINDS
@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("unscaled", [False, True])
def test_parameters_that_share_a_gradient_are_each_stepped_by_it(kind, clip, unscaled):
    first, second, third = (parameter_with(12.0, 1) for _ in range(3))
    second.grad = first.grad
    third.grad = torch.full((1,), 16.0)
    optimizer = kind([first, second, third], lr=1.0)
    scaler = started()
    if unscaled:
        scaler.unscale_(optimizer)
    if clip == "norm":  # 3 and 4 make 5; the one that is shared counts once.
        assert scaler.clip_grad_norm_(optimizer, 2.5).item() == 5.0
    elif clip == "value":
        scaler.clip_grad_value_(optimizer, 2.0)
    scaler.step(optimizer)
    scaler.update()
    expected = {None: (3.0, 4.0), "norm": (1.5, 2.0), "value": (2.0, 2.0)}[clip]
    steps = [1.0 - p.item() for p in (first, second, third)]
    assert steps == pytest.approx([expected[0], expected[0], expected[1]], rel=1e-5)
    assert first.grad is second.grad
    assert first.grad.item() == pytest.approx(expected[0], rel=1e-5)
    assert scaler.history()[0].norm == pytest.approx(5.0)


@KINDS
def test_an_overflow_that_comes_twice_is_counted_once(kind):
    first = parameter_with(INF)
    optimizer = optimizer_over(kind, [first, parameter_with(1.0), first])
    scaler = started()
    scaler.step(optimizer)
    scaler.update()
    report = scaler.overflow_report()
    assert [(g.index, g.inf) for g in report.gradients] == [(0, 2)]


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shared", [False, True])
def test_sparse_gradients_that_come_twice_are_unscaled_once(kind, dtype, shared):
    first = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    second = torch.nn.Parameter(torch.ones(4, dtype=dtype)) if shared else first
    first.grad = torch.sparse_coo_tensor([[1, 1]], torch.tensor([2.0, 6.0], dtype=dtype), (4,))
    second.grad = first.grad
    scaler = started()
    optimizer = optimizer_over(kind, [first, second])
    scaler._unscale_grads_(optimizer, torch.tensor(0.25), torch.tensor(0.0), True)
    for parameter in (first, second):
        assert parameter.grad.to_dense().tolist() == [0.0, 2.0, 0.0, 0.0]


class Tagged(torch.Tensor):
    """A subclass that is unscaled by way of Python."""


@pytest.mark.parametrize("shared", [False, True])
def test_subclasses_that_come_twice_are_unscaled_once(shared):
    first = torch.ones(2).as_subclass(Tagged).requires_grad_()
    second = torch.ones(2).as_subclass(Tagged).requires_grad_() if shared else first
    first.grad = torch.full((2,), 8.0).as_subclass(Tagged)
    second.grad = first.grad
    optimizer = optimizer_over(torch.optim.SGD, [first, second, parameter_with(4.0)])
    scaler = started()
    assert scaler.clip_grad_norm_(optimizer, 100.0).item() == pytest.approx(10**0.5)
    assert first.grad.tolist() == second.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_what_is_listed_twice_after_construction_is_stepped_once(name):
    results = []
    for repeats in (0, 3):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(3000)) for _ in range(40)]
        optimizer = getattr(fastamp.optim, name)(parameters, lr=0.1)
        optimizer.param_groups[0]["params"].extend(parameters[:1] * repeats)
        for p in parameters:
            p.grad = torch.randn_like(p)
        scaler = started()
        for _ in range(3):
            scaler.step(optimizer)
            scaler.update()
        results.append(parameters)
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


def test_two_optimizers_divide_a_gradient_twice_as_torch_does():
    for scaler in (started(), torch.amp.GradScaler("cpu", init_scale=4.0)):
        scaler.scale(torch.ones(()))
        parameter = parameter_with(16.0)
        for optimizer in [torch.optim.SGD([parameter], lr=1.0) for _ in range(2)]:
            scaler.unscale_(optimizer)
        assert parameter.grad.tolist() == [1.0, 1.0]
