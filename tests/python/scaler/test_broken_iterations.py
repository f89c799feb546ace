# SPDX-License-Identifier: Apache-2.0
"""Iterations that broke off between unscale_ and update, and programs that look alike."""

import gc
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch

import fastamp
from support.scaler_pairs import SCALERS

KINDS = pytest.mark.parametrize(
    "kind", [torch.optim.SGD, fastamp.optim.SGD], ids=["torch", "fused"]
)


def ready(kind, count=3, scaler_kind=fastamp.GradScaler):
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
    scaler = scaler_kind("cpu", init_scale=4.0)
    return scaler, kind(parameters, lr=1.0), parameters


def backward(scaler, parameters, factor=1.0):
    scaler.scale(sum(p.sum() * factor for p in parameters)).backward()


@KINDS
def test_a_step_by_gradients_of_a_new_backward_warns_of_their_scale(kind):
    scaler, optimizer, parameters = ready(kind)
    backward(scaler, parameters)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    backward(scaler, parameters)
    with pytest.warns(UserWarning, match=r"step: expected the gradients that unscale_\(\)") as seen:
        scaler.step(optimizer)
    assert seen[0].filename == __file__
    assert parameters[0].tolist() == [-3.0, -3.0]  # As with torch.


@KINDS
def test_sparse_gradients_that_clipping_replaced_by_their_sums_warn_of_nothing(kind):
    table = torch.nn.Embedding(3, 2, sparse=True)
    scaler, optimizer, _ = ready(kind)
    optimizer = kind([table.weight], lr=1.0)
    scaler.scale(table(torch.tensor([1, 1])).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 100.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)


@KINDS
def test_ending_the_broken_iteration_is_the_way_out(kind):
    scaler, optimizer, parameters = ready(kind)
    backward(scaler, parameters)
    scaler.unscale_(optimizer)
    scaler.update()
    optimizer.zero_grad()
    backward(scaler, parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(optimizer)
    assert parameters[0].tolist() == [0.0, 0.0]


@KINDS
def test_clipping_warns_too(kind):
    scaler, optimizer, parameters = ready(kind)
    backward(scaler, parameters)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    backward(scaler, parameters)
    with pytest.warns(UserWarning, match=r"clip_grad_norm_: expected the gradients"):
        scaler.clip_grad_norm_(optimizer, 100.0)
    with pytest.warns(UserWarning, match=r"clip_grad_value_: expected the gradients"):
        scaler.clip_grad_value_(optimizer, 100.0)


def replace(job):
    for p in job.parameters:
        p.grad = p.grad.clone() * 0.5


def edit(job):
    torch.nn.utils.clip_grad_norm_(job.parameters, 0.5)
    for p in job.parameters:
        p.grad.data = p.grad.data * 0.5


def drop_some(job):
    job.parameters[0].grad = None


def accumulate(job):
    sum(p.sum() for p in job.parameters).backward()


def accumulate_scaled(job):
    backward(job.scaler, job.parameters)


def zero_in_place(job):
    job.optimizer.zero_grad(set_to_none=False)
    backward(job.scaler, job.parameters)


def zero_some(job):
    job.parameters[0].grad = job.parameters[1].grad = None
    backward(job.scaler, job.parameters[:2])


def scale_others(job):
    job.scaler.scale(torch.ones((), requires_grad=True)).backward()


def scale_then_edit(job):
    scale_others(job)
    edit(job)


def drop_all(job):
    job.optimizer.zero_grad()
    scale_others(job)


@KINDS
@pytest.mark.parametrize(
    "meanwhile",
    [replace, edit, drop_some, accumulate, accumulate_scaled, zero_in_place, zero_some,
     scale_others, scale_then_edit, drop_all],
)  # fmt: skip
def test_programs_that_may_mean_it_go_on_as_with_torch(kind, meanwhile):
    results = []
    for scaler_kind in SCALERS:
        scaler, optimizer, parameters = ready(kind, scaler_kind=scaler_kind)
        backward(scaler, parameters)
        scaler.unscale_(optimizer)
        meanwhile(SimpleNamespace(scaler=scaler, optimizer=optimizer, parameters=parameters))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.step(optimizer)
            scaler.update()
        results.append([p.tolist() for p in parameters])
    assert results[0] == results[1]


def test_two_losses_and_two_optimizers_in_any_order_warn_of_nothing():
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    players = [ready(torch.optim.SGD)[1:] for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for optimizer, parameters in players:
                optimizer.zero_grad()
                backward(scaler, parameters)
                scaler.unscale_(optimizer)
            for optimizer, _ in players:
                scaler.step(optimizer)
            scaler.update()
    assert all(p.tolist() == [-2.0, -2.0] for _, parameters in players for p in parameters)


def test_an_optimizer_at_the_address_of_a_dead_one_is_unscaled():
    met = set()
    for _ in range(5):  # The address comes back at once, nearly always.
        scaler, optimizer, parameters = ready(torch.optim.SGD)
        backward(scaler, parameters)
        scaler.unscale_(optimizer)
        key, parameters = id(optimizer), [torch.nn.Parameter(torch.ones(2))]
        del optimizer
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        met.add(id(optimizer) == key)
        backward(scaler, parameters)
        scaler.step(optimizer)
        scaler.update()
        assert parameters[0].tolist() == [0.0, 0.0]
        assert scaler._core.optimizers == 1
    if True not in met:
        pytest.skip("no address came back")


def test_what_a_dead_optimizer_overflowed_counts_and_its_gradients_go():
    scaler, optimizer, parameters = ready(torch.optim.SGD)
    other = torch.nn.Parameter(torch.ones(2))
    backward(scaler, [*parameters, other])
    parameters[0].grad.fill_(float("inf"))
    scaler.unscale_(optimizer)
    gradient = weakref.ref(parameters[0].grad)
    optimizer.zero_grad()
    del optimizer, parameters
    gc.collect()
    assert gradient() is None
    scaler.step(torch.optim.SGD([other], lr=1.0))
    scaler.update()
    assert scaler.step_was_skipped
    assert [row.skipped for row in scaler.history()] == [True]
