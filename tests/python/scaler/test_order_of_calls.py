# SPDX-License-Identifier: Apache-2.0
"""The state machine of an iteration, bad input, and what a refused call leaves behind."""

import collections
import math
import warnings

import pytest
import torch

import fastamp
from support.scaler_pairs import SCALERS, bits, outcome, snapshot


def ready(kind=fastamp.GradScaler, grad=1.0, **options):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = None if grad is None else torch.full((2,), grad)
    scaler = kind("cpu", **options)
    scaler.scale(torch.ones(()))
    return scaler, torch.optim.SGD([parameter], lr=1.0), parameter


SEQUENCES = [
    ("unscale_", "unscale_"),
    ("step", "step"),
    ("step", "unscale_"),
    ("unscale_", "step", "update", "update"),
    ("update",),
    ("unscale_", "update", "unscale_", "step", "step"),
    ("unscale_", "step", "unscale_", "update", "step"),
]


@pytest.mark.parametrize("names", SEQUENCES)
@pytest.mark.parametrize("grad", [1.0, float("nan"), None])
def test_each_order_of_calls_raises_and_returns_what_torchs_does(names, grad):
    if grad is None and names == ("step", "unscale_"):
        pytest.skip("differs on purpose: see the next test")
    traces = []
    for kind in SCALERS:
        scaler, optimizer, parameter = ready(kind, grad)
        trace = []
        for name in names:
            arguments = () if name == "update" else (optimizer,)
            trace.append(outcome(getattr(scaler, name), *arguments))
            trace.append((bits(parameter), scaler.state_dict()))
        traces.append(trace)
    assert traces[0] == traces[1]


def test_a_step_refused_for_lack_of_gradients_can_be_repeated_once_they_are_there():
    scaler, optimizer, parameter = ready(grad=None)
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)
    assert len(scaler._per_optimizer_states) == 0  # torch's stays "unscaled" here.
    parameter.grad = torch.full((2,), 65536.0)
    scaler.step(optimizer)
    assert parameter.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (("unscale_", "unscale_"), RuntimeError, "already been called on this optimizer"),
        (("step", "step"), RuntimeError, "step: expected one call.*already been called"),
        (("step", "unscale_"), RuntimeError, r"unscale_\(\) is being called after step\(\)"),
        (("update",), AssertionError, "update: expected.*No inf checks were recorded prior"),
    ],
)
def test_texts_name_the_call_what_was_expected_and_what_came(names, error, text):
    scaler, optimizer, _ = ready()
    calls = [
        (lambda n=n: getattr(scaler, n)(*(() if n == "update" else (optimizer,)))) for n in names
    ]
    for call in calls[:-1]:
        call()
    with pytest.raises(error, match=text):
        calls[-1]()


@pytest.mark.parametrize("name", ["unscale_", "step", "update"])
def test_calls_before_scale_are_refused(name):
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for kind in SCALERS:
        scaler = kind("cpu")
        with pytest.raises(AssertionError, match="_scale is None"):
            getattr(scaler, name)(*(() if name == "update" else (optimizer,)))
        assert len(scaler._per_optimizer_states) == 0


@pytest.mark.parametrize("first", [None, "unscale_", "step"])
@pytest.mark.parametrize("refused", ["unscale_", "step", "closure", "update_tensor", "load"])
def test_a_refused_call_changes_nothing(first, refused):
    scaler, optimizer, parameter = ready()
    if first is not None:
        getattr(scaler, first)(optimizer)
    if refused == "step" and first != "step":
        parameter.grad = None
        if first == "unscale_":
            scaler.update(4.0)
    if refused == "unscale_" and first is None:
        parameter.grad = torch.ones(2).half().float()
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1).half())]})
        optimizer.param_groups[1]["params"][0].grad = torch.ones(1).half()
    before = snapshot(scaler, [optimizer]), bits(parameter)
    gradient = None if parameter.grad is None else bits(parameter.grad)
    calls = {
        "unscale_": lambda: scaler.unscale_(optimizer),
        "step": lambda: scaler.step(optimizer),
        "closure": lambda: scaler.step(optimizer, closure=lambda: 1.0),
        "update_tensor": lambda: scaler.update(torch.ones(2)),
        "load": lambda: scaler.load_state_dict({"scale": 2.0}),
    }
    assert outcome(calls[refused])[0] == "raised"
    assert (snapshot(scaler, [optimizer]), bits(parameter)) == before
    assert (None if parameter.grad is None else bits(parameter.grad)) == gradient


def test_a_refused_fp16_gradient_leaves_the_gradients_before_it_alone():
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2).half())
    first.grad, second.grad = torch.full((2,), 8.0), torch.ones(2).half()
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(
        ValueError, match=r"unscale_: expected.*got float16.*Attempting to unscale FP16"
    ):
        scaler.unscale_(torch.optim.SGD([first, second], lr=1.0))
    assert first.grad.tolist() == [8.0, 8.0]
    assert len(scaler._per_optimizer_states) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"growth_factor": 1.0},
        {"growth_factor": 0.5},
        {"backoff_factor": 1.0},
        {"backoff_factor": 2.0},
        {"growth_factor": 1.0, "enabled": False},
        {"growth_factor": float("nan")},
        {"init_scale": -1.0},
        {"init_scale": 0.0},
        {"growth_interval": 0},
        {"growth_interval": -3},
        {"backoff_factor": -2.0},
    ],
)
def test_constructor_refuses_and_accepts_what_torchs_does(options):
    results = [outcome(lambda k=k: type(k("cpu", **options)) is k) for k in SCALERS]
    if math.isnan(options.get("growth_factor", 1.0)) and results[0][0] == "raised":
        results[0] = ("returned", True)  # torch 2.10 refuses it; 2.11 and fastamp take it.
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "new_scale",
    [
        3.0,
        2,
        True,
        "3.0",
        torch.tensor(3.0),
        torch.tensor(3.0, dtype=torch.float64),
        torch.tensor(3, dtype=torch.int64),
        torch.tensor([3.0]),
        torch.tensor([[3.0]]),
        torch.ones(2),
        torch.ones(0),
        torch.tensor(3.0, requires_grad=True),
        torch.tensor(3.0, device="meta"),
        torch.nn.Parameter(torch.tensor(3.0)),
        float("nan"),
        -1.0,
    ],
    ids=repr,
)
def test_new_scale_is_refused_and_taken_as_torch_does(new_scale):
    results = []
    for kind in SCALERS:
        scaler, optimizer, _ = ready(kind)
        scaler.step(optimizer)
        result = outcome(lambda s=scaler: s.update(new_scale))
        results.append((result, snapshot(scaler, [optimizer])[1:]))
    assert results[0] == results[1]


def test_new_scale_is_copied_and_keeps_the_growth_count():
    scaler, optimizer, _ = ready(growth_interval=10)
    scaler.step(optimizer)
    scaler.update()
    value = torch.tensor(3.0)
    scaler.update(value)
    value.fill_(5.0)
    assert scaler.get_scale() == 3.0
    assert scaler._get_growth_tracker() == 1


def test_cuda_without_cuda_warns_here_and_disables():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    for kind in SCALERS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler = kind()
        assert [(w.category, w.filename) for w in caught] == [(UserWarning, __file__)]
        assert "CUDA is not available.  Disabling." in str(caught[0].message)
        assert not scaler.is_enabled()
        assert "_scale" not in vars(scaler)


def test_a_disabled_scaler_only_steps():
    scaler = fastamp.GradScaler("cpu", enabled=False)
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), float("inf"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    assert scaler.unscale_(optimizer) is None
    assert scaler.step(optimizer, closure=lambda: 7.0) == 7.0
    assert scaler.update() is None
    assert scaler.update("anything") is None
    assert scaler.get_scale() == 1.0
    assert scaler._get_growth_tracker() == 0
    assert scaler.state_dict() == {}
    assert scaler.load_state_dict({}) is None
    assert parameter.item() == float("-inf")
    with pytest.raises(AttributeError):
        scaler.get_growth_factor()


def test_getters_and_setters():
    scaler = fastamp.GradScaler("cpu", 8.0, 4.0, 0.25, 7)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (8.0, 4.0)
    assert (scaler.get_backoff_factor(), scaler.get_growth_interval()) == (0.25, 7)
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.5)
    scaler.set_growth_interval(1)
    scaler.scale(torch.ones(()))
    flag = torch.zeros(())
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {flag.device: flag}
    scaler.update()
    assert scaler.get_scale() == 24.0


def test_per_optimizer_states_is_a_live_mapping():
    scaler, optimizer, _ = ready()
    assert isinstance(scaler._per_optimizer_states, collections.defaultdict)
    assert scaler._per_optimizer_states[1]["stage"] is torch.amp.grad_scaler.OptState.READY
    scaler.unscale_(optimizer)
    del scaler._per_optimizer_states[id(optimizer)]
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states.clear()
    scaler.step(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"] = torch.amp.grad_scaler.OptState.READY
    scaler.step(optimizer)
    state["found_inf_per_device"][torch.device("cpu")].fill_(1.0)
    before = scaler.get_scale()
    scaler.update()
    assert scaler.get_scale() == before * 0.5


def test_step_returns_what_the_optimizer_returned_and_none_when_skipped():
    class Returning(torch.optim.SGD):
        def step(self, first=None, *, second=0):
            return first, second

    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = Returning([parameter], lr=1.0)
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    parameter.grad = torch.ones(1)
    assert scaler.step(optimizer, 1, second=2) == (1, 2)
    scaler.update()
    parameter.grad = torch.full((1,), float("nan"))
    assert scaler.step(optimizer, 1, second=2) is None


def test_an_exception_in_optimizer_step_leaves_the_iteration_open():
    for kind in SCALERS:
        scaler, optimizer, _ = ready(kind)
        good, optimizer.step = optimizer.step, lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            scaler.step(optimizer)
        optimizer.step = good
        scaler.step(optimizer)
        scaler.update()


def test_flags_of_several_optimizers_are_combined_without_being_written():
    scaler, first, _ = ready(init_scale=8.0)
    second = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    second.param_groups[0]["params"][0].grad = torch.full((1,), float("inf"))
    scaler.step(first)
    scaler.step(second)
    flags = scaler._found_inf_per_device(first), scaler._found_inf_per_device(second)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert [f[torch.device("cpu")].item() for f in flags] == [0.0, 1.0]


@pytest.mark.parametrize("given", ["model", "parameters", "nothing"])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("function", ["clip_grad_norm_", "pass_"])
def test_what_is_no_optimizer_is_refused_by_name_and_changes_nothing(function, enabled, given):
    model = torch.nn.Linear(2, 2)
    scaler = fastamp.GradScaler("cpu", enabled=enabled)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    before = scaler.state_dict(), bits(model.weight.grad)
    wrong = {"model": model, "parameters": list(model.parameters()), "nothing": None}[given]
    expected = f"{function}: expected optimizer to have param_groups.*got {type(wrong).__name__}"
    calls = {
        "clip_grad_norm_": lambda: scaler.clip_grad_norm_(wrong, 1.0),
        "pass_": lambda: scaler.pass_(wrong).__enter__(),
    }
    with pytest.raises(TypeError, match=expected):
        calls[function]()
    assert (scaler.state_dict(), bits(model.weight.grad)) == before
    assert not enabled or not scaler._per_optimizer_states
