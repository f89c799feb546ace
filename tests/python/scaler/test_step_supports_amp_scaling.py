# SPDX-License-Identifier: Apache-2.0
"""Optimizers that skip by themselves: the protocol of `_step_supports_amp_scaling`."""

import warnings

import pytest
import torch

import fastamp
from support.scaler_pairs import SCALERS, bits, outcome, set_gradients, snapshot, twin_parameters


class Watching(torch.optim.SGD):
    """Notes what the scaler sets for the time of step()."""

    _step_supports_amp_scaling = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def step(self, _closure=None):
        scale, flag = self.grad_scale, self.found_inf
        self.seen.append((None if scale is None else float(scale), float(flag)))
        return "stepped"


class Receiving(torch.optim.SGD):
    """The deprecated form: takes the scaler as an argument."""

    _step_supports_amp_scaling = True

    def step(self, _closure=None, *, grad_scaler=None):
        self.got = grad_scaler
        grad_scaler.unscale_(self)
        return "stepped"


def prepared(kind, optimizer_type, grad=2.0, **options):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = None if grad is None else torch.full((2,), grad)
    scaler = kind("cpu", init_scale=8.0, **options)
    scaler.scale(torch.ones(()))
    return scaler, optimizer_type([parameter], lr=1.0)


@pytest.mark.parametrize("grad", [2.0, float("nan"), None])
@pytest.mark.parametrize("preset", [None, 3.0])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_attributes_during_step_are_torchs(grad, preset, unscale_first):
    results = []
    for kind in SCALERS:
        scaler, optimizer = prepared(kind, Watching, grad)
        if preset is not None:
            optimizer.grad_scale = torch.tensor(preset)
        if unscale_first:
            scaler.unscale_(optimizer)
        result = scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        results.append((result, optimizer.seen, snapshot(scaler, [optimizer])))
        results[-1] += (outcome(lambda s=scaler, o=optimizer: s.step(o)),)
        results[-1] += (outcome(scaler.update), scaler.get_scale())
    assert results[0] == results[1]


def test_the_check_pass_leaves_the_gradients_scaled():
    scaler, optimizer = prepared(fastamp.GradScaler, Watching)
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["params"][0].grad.tolist() == [2.0, 2.0]


def test_fp16_gradients_are_allowed_here():
    parameter = torch.nn.Parameter(torch.ones(2).half())
    parameter.grad = torch.ones(2).half()
    for kind in SCALERS:
        scaler = kind("cpu")
        scaler.scale(torch.ones(()))
        assert scaler.step(Watching([parameter], lr=1.0)) == "stepped"


def test_two_raised_flags_reach_the_optimizer_as_one():
    # torch's fused kernels compare found_inf with 1: a sum of 2 makes them apply the update.
    for kind, expected in zip(SCALERS, (2.0, 1.0), strict=True):
        scaler, optimizer = prepared(kind, Watching)
        scaler.unscale_(optimizer)
        flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        flags[torch.device("cpu")] = torch.ones(())
        flags[torch.device("meta")] = torch.ones((1,))
        scaler.step(optimizer)
        assert optimizer.seen[0][1] == expected


def test_any_non_zero_flag_is_an_overflow():
    scaler, optimizer = prepared(fastamp.GradScaler, Watching)
    for value in (2.0, -1.0, 0.5, float("nan")):
        scaler.unscale_(optimizer)
        scaler._found_inf_per_device(optimizer)[torch.device("cpu")].fill_(value)
        scaler.step(optimizer)
        assert optimizer.seen[-1][1] == 1.0
        before = scaler.get_scale()
        scaler.update()
        assert scaler.get_scale() == before / 2


def test_the_deprecated_argument_is_passed_with_a_warning_at_the_caller():
    for kind in SCALERS:
        scaler, optimizer = prepared(kind, Receiving)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert scaler.step(optimizer) == "stepped"
        assert [(w.category, w.filename) for w in caught] == [(FutureWarning, __file__)]
        assert "is going to stop passing itself" in str(caught[0].message)
        assert optimizer.got is scaler
        assert optimizer.param_groups[0]["params"][0].grad.tolist() == [0.25, 0.25]
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizer)


def test_a_scale_that_a_subclass_takes_away_is_an_error_as_in_torch():
    for kind in SCALERS:
        scaler, optimizer = prepared(kind, Watching)
        scaler._get_scale_async = lambda: None
        with pytest.raises(AssertionError):
            scaler.step(optimizer)
        assert optimizer.seen == []


def test_attributes_are_removed_if_step_raises():
    class Failing(Watching):
        def step(self, _closure=None):
            raise KeyError("x")

    scaler, optimizer = prepared(fastamp.GradScaler, Failing)
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_torchs_fused_optimizers_end_in_equal_weights(name):
    twins = twin_parameters([(7,), (3, 2)], seed=1)
    optimizers = [getattr(torch.optim, name)(p, lr=0.1, fused=True) for p in twins]
    scalers = [kind("cpu", init_scale=8.0, growth_interval=2) for kind in SCALERS]
    generator = torch.Generator().manual_seed(2)
    for step in range(20):
        values = [torch.randn(p.shape, generator=generator) for p in twins[0]]
        if step % 5 == 3:
            values[1][0, 0] = float("inf")
        set_gradients(twins, values)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.scale(torch.ones(()))
            if step % 3 == 0:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert snapshot(scalers[0]) == snapshot(scalers[1])
        assert [bits(p) for p in twins[0]] == [bits(p) for p in twins[1]]
