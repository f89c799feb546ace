# SPDX-License-Identifier: Apache-2.0
"""Gradients that a step with an AmpStep reads: those that were checked, or what others wrote."""

import pytest
import torch

import fastamp
import fastamp.optim

SCALE = 8.0
OPTIMIZERS = [
    ("SGD", {"lr": 0.5, "momentum": 0.9}),
    ("AdamW", {"lr": 0.5}),
    ("Muon", {"lr": 0.5}),
]
# A pre-hook for `optimizer` of four parameters, of which the second has no gradient.


def replace_a_gradient(optimizer):
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = parameter.grad * 3


def remove_a_gradient(optimizer):
    optimizer.param_groups[0]["params"][0].grad = None


def swap_gradients(optimizer):
    first, _, third, _ = optimizer.param_groups[0]["params"]
    first.grad, third.grad = third.grad, first.grad


def give_a_gradient(optimizer):
    first, second = optimizer.param_groups[0]["params"][:2]
    second.grad = first.grad.clone()


def remove_a_parameter(optimizer):
    del optimizer.param_groups[0]["params"][0]


def add_a_group(optimizer):
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.full((2, 3), SCALE)
    optimizer.add_param_group({"params": [parameter]})


EDITS = [
    replace_a_gradient,
    remove_a_gradient,
    swap_gradients,
    give_a_gradient,
    remove_a_parameter,
    add_a_group,
]


def made(name, options, dtype=torch.float32):
    parameters = [torch.nn.Parameter(torch.ones(2, 3, dtype=dtype)) for _ in range(4)]
    for number, parameter in enumerate(parameters):
        if number != 1:
            values = torch.arange(6, dtype=dtype).reshape(2, 3) + number
            parameter.grad = values * SCALE
    return parameters, getattr(fastamp.optim, name)(parameters, **options)


def results(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [p.detach() for p in parameters]
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        tensors += [value for _, value in sorted(state.items()) if torch.is_tensor(value)]
    return tensors


def assert_same(first, second):
    a, b = results(first), results(second)
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def by_hand(optimizer):
    """What the scaler's step has to come to."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad /= SCALE
    optimizer.step()


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_what_a_pre_hook_edits_is_stepped_as_it_left_it(name, options, dtype, edit):
    parameters, optimizer = made(name, options, dtype)
    scaler = fastamp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    optimizer.register_step_pre_hook(lambda *_: edit(optimizer))
    scaler.step(optimizer)
    scaler.update()
    others, expected = made(name, options, dtype)
    edit(expected)
    by_hand(expected)
    assert_same(optimizer, expected)
    for parameter, other in zip(parameters, others, strict=True):
        assert (parameter.grad is None) == (other.grad is None)
        assert other.grad is None or torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("call", ["unscale", "clip"])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_edits_between_an_earlier_pass_and_the_step_are_stepped(name, options, call, edit):
    _, optimizer = made(name, options)
    scaler = fastamp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    _, expected = made(name, options)
    if call == "unscale":
        scaler.unscale_(optimizer)
        for parameter in expected.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad /= SCALE
        edit(optimizer)
        edit(expected)
        expected.step()
    else:
        scaler.clip_grad_norm_(optimizer, 1e6)  # Changes nothing.
        edit(optimizer)
        edit(expected)
        by_hand(expected)
    scaler.step(optimizer)
    assert_same(optimizer, expected)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_several_optimizers_step_their_own_gradients(name, options, keep):
    made_ones = [made(name, options) for _ in range(3)]
    for number, (parameters, _) in enumerate(made_ones):
        parameters[number].grad = None
    scaler = fastamp.GradScaler("cpu", init_scale=SCALE, keep_scaled_grads=keep)
    for _ in range(3):
        scaler.scale(torch.ones(()))
        before = [[p.grad if p.grad is None else p.grad.clone() for p in ps] for ps, _ in made_ones]
        for _, optimizer in made_ones:
            scaler.step(optimizer)
        scaler.update()
        for (parameters, _), kept in zip(made_ones, before, strict=True):
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient
    for number, (_, optimizer) in enumerate(made_ones):
        parameters, expected = made(name, options)
        parameters[number].grad = None
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= SCALE
        for _ in range(3):
            expected.step()
        assert_same(optimizer, expected)


class Subclass(torch.nn.Parameter):
    @property
    def grad(self):
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value):
        torch.Tensor.grad.__set__(self, value)


MIDDLES = {
    "sparse": lambda: torch.nn.Parameter(torch.ones(2, 3)),
    "double": lambda: torch.nn.Parameter(torch.ones(2, 3).double()),
    "strided": lambda: torch.nn.Parameter(torch.ones(3, 2).t()),
    "subclass": lambda: Subclass(torch.ones(2, 3)),
}


@pytest.mark.parametrize("kind", MIDDLES)
def test_a_gradient_of_another_kind_among_plain_ones(kind):
    def made_with():
        parameters = [torch.nn.Parameter(torch.ones(2, 3)), MIDDLES[kind]()]
        parameters.append(torch.nn.Parameter(torch.ones(2, 3)))
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, SCALE * (number + 1))
        if kind == "sparse":
            parameters[1].grad = parameters[1].grad.to_sparse()
        return fastamp.optim.SGD(parameters, lr=0.5)

    optimizer, expected = made_with(), made_with()
    scaler = fastamp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    by_hand(expected)
    assert_same(optimizer, expected)
