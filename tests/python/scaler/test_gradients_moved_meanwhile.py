# SPDX-License-Identifier: Apache-2.0
"""User code may move gradients that are being collected: none is written at its old place."""

import weakref

import pytest
import torch

import fastamp
from support.gradient_lists import gradients, plain_optimizer


class Meddles(torch.nn.Parameter):
    """Runs a function when its gradient is read."""

    meddle = staticmethod(lambda: None)

    @property
    def grad(self):
        type(self).meddle()
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value):
        torch.Tensor.grad.__set__(self, value)


def with_meddler(count):
    optimizer = plain_optimizer(count)
    meddler = Meddles(torch.zeros(3))
    torch.Tensor.grad.__set__(meddler, torch.full((3,), 8.0))
    optimizer.param_groups[0]["params"].append(meddler)
    return optimizer


@pytest.mark.parametrize("count", [1, 40])
def test_a_gradient_that_moves_while_others_are_collected_is_unscaled_where_it_is(
    monkeypatch, count
):
    optimizer = with_meddler(count)
    first = gradients(optimizer)[0]
    left = first.detach().clone()
    old = torch.empty(0).set_(first.untyped_storage())

    def move():
        first.set_(torch.full((5000,), 6.0))

    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    monkeypatch.setattr(Meddles, "meddle", staticmethod(move))
    scaler.unscale_(optimizer)
    assert first.shape == (5000,)
    assert first.eq(3.0).all()
    assert torch.equal(old, left)


def test_a_list_that_shrinks_while_it_is_read_is_read_to_its_new_end(monkeypatch):
    optimizer = with_meddler(40)
    parameters = optimizer.param_groups[0]["params"]
    parameters.extend(plain_optimizer(80).param_groups[0]["params"])
    last = parameters[-1]
    monkeypatch.setattr(
        Meddles, "meddle", staticmethod(lambda: parameters.__delitem__(slice(50, None)))
    )
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert len(parameters) == 50
    monkeypatch.setattr(Meddles, "meddle", staticmethod(lambda: None))
    assert all(g.eq(4.0).all() for g in gradients(optimizer))
    assert last.grad.eq(8.0).all()


def moves(gradient):
    """Returns what moves a gradient elsewhere, and what is left where it was."""
    left = torch.empty(0).set_(gradient.untyped_storage())
    return lambda: gradient.set_(torch.full((5000,), 6.0)), left


class Replies(dict):
    """A group that runs a function when it is asked for its parameters."""

    def __init__(self, action, **items):
        super().__init__(**items)
        self.action = action

    def __getitem__(self, key):
        self.action()
        return super().__getitem__(key)


def from_generator(action, parameters):
    def generate():
        action()
        yield from parameters

    return {"params": generate()}


class ListOfItsOwn(list):
    def __init__(self, action, items):
        super().__init__(items)
        self.action = action

    def __iter__(self):
        self.action()
        return super().__iter__()


GROUPS = {
    "mapping": lambda action, parameters: Replies(action, params=parameters),
    "generator": from_generator,
    "list": lambda action, parameters: {"params": ListOfItsOwn(action, parameters)},
}


@pytest.mark.parametrize("group", GROUPS)
def test_groups_that_run_python_code_cannot_have_gradients_written_where_they_were(group):
    first, second = plain_optimizer(2), plain_optimizer(2)
    gradient = gradients(first)[0]
    move, left = moves(gradient)
    first.param_groups.append(GROUPS[group](move, second.param_groups[0]["params"]))
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(first)
    assert gradient.shape == (5000,)
    assert gradient.eq(3.0).all()
    assert left.eq(8.0).all()
    assert all(g.eq(4.0).all() for g in gradients(second))


def test_code_that_runs_when_an_earlier_gradient_goes_sees_no_kernel_between():
    optimizer = plain_optimizer(2)
    first, second = optimizer.param_groups[0]["params"]
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states.clear()
    first.grad.fill_(8.0)
    gradient = first.grad
    move, left = moves(gradient)
    watch = weakref.ref(second.grad, lambda _: move())
    second.grad = torch.full((3,), 8.0)
    scaler.unscale_(optimizer)
    assert watch() is None
    assert gradient.shape == (5000,)
    assert gradient.eq(3.0).all()
    assert left.eq(8.0).all()


class Wrapped(torch.Tensor):
    """A scale whose operators run a function first."""

    action = staticmethod(lambda: None)

    @staticmethod
    def __new__(cls, tensor):
        made = torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)
        made.tensor = tensor
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.action()
        args, kwargs = torch.utils._pytree.tree_map(
            lambda leaf: leaf.tensor if isinstance(leaf, cls) else leaf, (args, kwargs or {})
        )
        return func(*args, **kwargs)


@pytest.mark.parametrize("which", ["scale", "inv_scale", "found_inf"])
def test_a_scale_that_runs_python_code_cannot_have_gradients_written_where_they_were(
    which, monkeypatch
):
    optimizer = plain_optimizer(2)
    gradient = gradients(optimizer)[0]
    move, left = moves(gradient)
    monkeypatch.setattr(Wrapped, "action", staticmethod(move))
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    if which == "scale":
        scaler._scale = Wrapped(torch.tensor(2.0))
        scaler.unscale_(optimizer)
    else:
        half, flag = torch.tensor(0.5), torch.zeros(())
        half = Wrapped(half) if which == "inv_scale" else half
        flag = Wrapped(flag) if which == "found_inf" else flag
        scaler._unscale_grads_(optimizer, half, flag, False)
    assert gradient.shape == (5000,)
    assert gradient.eq(3.0).all()
    assert left.eq(8.0).all()
