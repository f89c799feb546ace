# SPDX-License-Identifier: Apache-2.0
"""Steps of fastamp's optimizers through the scaler against torch.amp with torch.optim."""

import copy
import pickle
import random
import sys
import warnings

import pytest
import torch

import fastamp
import fastamp.optim
from fastamp import _C
from support.amp_step_pairs import CASES, SHAPES, assert_close, gradients, pair, step_both
from support.scaler_pairs import set_gradients


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("clip", ["none", "unscale", "scaler", "unscale+scaler", "value"])
def test_hundreds_of_steps_with_overflows_are_torchs(name, options, clip):
    first, second = pair(name, options)
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    skips = 0
    for _ in range(120):
        values, bad = gradients(generator, rng)
        skips += bad
        set_gradients([first[0], second[0]], values)
        for parameters, optimizer, scaler in (first, second):
            mine = scaler is first[2]
            scaler.scale(torch.ones(()))
            if clip != "none" and (not mine or clip.startswith("unscale")):
                scaler.unscale_(optimizer)
            if clip == "value":
                if mine:
                    scaler.clip_grad_value_(optimizer, 0.01)
                else:
                    torch.nn.utils.clip_grad_value_(parameters, 0.01)
            elif clip != "none":
                if mine and clip.endswith("scaler"):
                    scaler.clip_grad_norm_(optimizer, 0.5)
                else:
                    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            scaler.step(optimizer)
            assert not mine or scaler.step_was_skipped == bad
            scaler.update()
        assert first[2].step_was_skipped == bad
        assert_close(first, second)
    assert 10 < skips < 60


def test_optimizer_step_is_always_called_and_its_hooks_run():
    first, _ = pair("SGD", {"lr": 0.1})
    parameters, optimizer, scaler = first
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    before = copy.deepcopy(parameters)
    set_gradients([parameters], [torch.full(shape, float("inf")) for shape in SHAPES])
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert calls == ["pre", "post"]
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert scaler.step_was_skipped
    assert "_fastamp_pending_amp_step" not in vars(optimizer)


def test_what_a_subclass_s_step_returns_is_returned():
    class Counting(fastamp.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            return "stepped"

    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Counting([parameter], lr=0.5)
    scaler = fastamp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.ones(3)
    assert scaler.step(optimizer) == "stepped"
    assert parameter.tolist() == [0.5] * 3
    fastamp.StepGuard(optimizer)
    assert optimizer.step() == "stepped"
    assert parameter.tolist() == [0.0] * 3


def test_who_replaced_step_to_learn_of_skips_learns_of_them():
    parameters, optimizer, scaler = pair("AdamW", {"lr": 0.1})[0]
    called = []
    original = optimizer.step

    def patched(*args, **kwargs):
        called.append(True)
        return original(*args, **kwargs)

    optimizer.step = patched
    for bad in (False, True, False):
        called.clear()
        value = float("inf") if bad else 1.0
        set_gradients([parameters], [torch.full(shape, value) for shape in SHAPES])
        scaler.scale(torch.ones(()))
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer, None)
        scaler.update()
        assert called == ([] if bad else [True])
        assert scaler.step_was_skipped == bad


def test_a_learning_rate_scheduler_does_not_count_as_a_watcher():
    parameters, optimizer, scaler = pair("SGD", {"lr": 1.0})[0]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    set_gradients([parameters], [torch.full(shape, 2.0**10) for shape in SHAPES])
    before = [p.detach().clone() for p in parameters]
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]
    for old, new in zip(before, parameters, strict=True):
        torch.testing.assert_close(new, old - 1.0)


def test_a_scheduler_after_a_skipped_first_step_has_no_call_to_miss():
    """torch warns there that optimizer.step was never called."""
    warned = []
    for parameters, optimizer, scaler in pair("SGD", {"lr": 1.0}):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        set_gradients([parameters], [torch.full(shape, float("inf")) for shape in SHAPES])
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step()
        warned.append([w.category for w in caught])
    assert warned == [[], [UserWarning]]


@pytest.mark.parametrize("method", ["unscale_", "_unscale_grads_"])
def test_a_subclass_that_overrides_unscaling_is_asked(method):
    calls = []

    def overriding(self, *args):
        calls.append(method)
        return getattr(fastamp.GradScaler, method)(self, *args)

    kind = type("Sub", (fastamp.GradScaler,), {method: overriding})
    first, second = pair("AdamW", {"lr": 0.01})
    first = (*first[:2], kind("cpu", init_scale=2.0**10, growth_interval=3))
    rng, generator = random.Random(5), torch.Generator().manual_seed(5)
    for _ in range(10):
        step_both(first, second, generator, rng)
    assert len(calls) == 10


def test_a_subclass_that_decides_on_the_step_does():
    class Never(fastamp.GradScaler):
        def _maybe_opt_step(self, *_args, **_kwargs):
            return "never"

    parameters, optimizer, _ = pair("SGD", {"lr": 1.0})[0]
    scaler = Never("cpu")
    set_gradients([parameters], [torch.ones(shape) for shape in SHAPES])
    before = copy.deepcopy(parameters)
    scaler.scale(torch.ones(()))
    assert scaler.step(optimizer) == "never"
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_refused_steps_change_nothing():
    parameters, optimizer, scaler = pair("SGD", {"lr": 1.0})[0]
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)
    assert len(scaler._per_optimizer_states) == 0
    set_gradients([parameters], [torch.ones(shape) for shape in SHAPES])
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: None)
    with pytest.raises(TypeError):
        scaler.step(optimizer, unknown=3)
    assert "_fastamp_pending_amp_step" not in vars(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="expected one call per optimizer"):
        scaler.step(optimizer)
    scaler.update()


def test_a_closure_by_position_runs_as_with_torch():
    first, second = pair("SGD", {"lr": 1.0})
    results = []
    for parameters, optimizer, scaler in (first, second):
        set_gradients([parameters], [torch.full(shape, 3.0) for shape in SHAPES])
        scaler.scale(torch.ones(()))
        results.append(scaler.step(optimizer, lambda: 7.0))
        scaler.update()
    assert results == [7.0, 7.0]
    assert_close(first, second)


def test_several_optimizers_and_micro_batches():
    sides = []
    for optim, kind in ((fastamp.optim, fastamp.GradScaler), (torch.optim, torch.amp.GradScaler)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        optimizers = [
            optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
            optim.AdamW(model[2].parameters(), lr=0.01),
        ]
        scaler = kind("cpu", init_scale=2.0**8, growth_interval=2)
        generator = torch.Generator().manual_seed(0)
        trace = []
        for number in range(40):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for _ in range(3):
                inputs = torch.randn(6, 4, generator=generator)
                if number % 7 == 3:
                    inputs[0, 0] = float("inf")
                scaler.scale(model(inputs).square().mean() / 3).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            trace.append(scaler.get_scale())
        sides.append((trace, [p.detach().clone() for p in model.parameters()]))
    assert sides[0][0] == sides[1][0]
    for left, right in zip(sides[0][1], sides[1][1], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_training_goes_on_from_a_copy(copied):
    first, second = pair("AdamW", {"lr": 0.01})
    rng, generator = random.Random(5), torch.Generator().manual_seed(5)
    for number in range(12):
        step_both(first, second, generator, rng)
        if number == 5:
            first = (*first[:2], copied(first[2]))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_nothing_waits_on_cuda(name):
    parameters = [torch.nn.Parameter(torch.ones(33, device="cuda")) for _ in range(5)]
    optimizer = getattr(fastamp.optim, name)(parameters, lr=0.1)
    scaler = fastamp.GradScaler("cuda")
    for number in range(6):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        if number == 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.scale(torch.ones((), device="cuda"))
            if number % 2:
                scaler.unscale_(optimizer)
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scaler.get_scale_async()
        finally:
            if number == 5:
                torch.cuda.set_sync_debug_mode("default")
    assert not scaler.step_was_skipped


class CountedCore:
    """A scaler's core that notes which of its methods are used: profilers do not see those."""

    def __init__(self, core, names):
        self._core, self._names = core, names

    def __getattr__(self, name):
        self._names.append(name)
        return getattr(self._core, name)


def native_calls(scaler, action):
    """The names of fastamp's native functions that a call of Python comes to."""
    names = []

    def note(_frame, event, argument):
        if event == "c_call" and vars(_C).get(argument.__name__) is argument:
            names.append(argument.__name__)

    core = scaler._core
    scaler._kept_core = CountedCore(core, names)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        scaler._kept_core = core
    return names


@pytest.mark.parametrize("clip", [False, True])
def test_a_step_with_an_amp_step_crosses_into_native_code_twice(clip):
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = fastamp.optim.SGD([parameter], lr=1.0)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    for _ in range(2):
        scaler.scale(parameter.sum()).backward()
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        step = native_calls(scaler, lambda: scaler.step(optimizer))
        update = native_calls(scaler, scaler.update)
        optimizer.zero_grad()
    assert step == ["begin_step", "sgd_step"]
    assert update == ["end_iteration"]
