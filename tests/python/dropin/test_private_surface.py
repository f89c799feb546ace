# SPDX-License-Identifier: Apache-2.0
"""The private names that libraries use mean with us what they mean in torch."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler as TorchScaler
from torch.amp.grad_scaler import OptState

import fastamp

INF = float("inf")
USED_BY_OTHERS = [
    "_check_inf_per_device",
    "_enabled",
    "_found_inf_per_device",
    "_get_scale_async",
    "_growth_tracker",
    "_init_scale",
    "_lazy_init_scale_growth_tracker",
    "_maybe_opt_step",
    "_per_optimizer_states",
    "_scale",
    "_unscale_grads_",
]


def make(cls: type, **options: Any) -> Any:
    return cls("cpu", **{"init_scale": 8.0, **options})


def trainable(*grads: float) -> tuple[list[torch.nn.Parameter], Any]:
    parameters = []
    for grad in grads:
        parameters.append(torch.nn.Parameter(torch.ones(2)))
        parameters[-1].grad = torch.full((2,), grad)
    return parameters, torch.optim.SGD(parameters, lr=1.0)


def test_every_name_of_torchs_scaler_exists_with_its_parameters():
    assert set(USED_BY_OTHERS) <= set(dir(make(TorchScaler)))
    for name, torchs in vars(TorchScaler).items():
        own = getattr(fastamp.GradScaler, name)
        if not inspect.isfunction(torchs):
            continue
        wanted = list(inspect.signature(torchs).parameters.values())
        got = list(inspect.signature(own).parameters.values())
        assert [p.name for p in got[: len(wanted)]] == [p.name for p in wanted], name
        assert [p.default for p in got[: len(wanted)]] == [p.default for p in wanted], name
        assert all(p.kind is p.KEYWORD_ONLY for p in got[len(wanted) :]), name


@pytest.mark.parametrize("enabled", [True, False])
def test_a_new_scaler_has_exactly_torchs_attributes_and_values(enabled: bool):
    torchs, own = (make(cls, enabled=enabled) for cls in (TorchScaler, fastamp.GradScaler))
    assert vars(own) == vars(torchs)
    if enabled:
        assert type(own._per_optimizer_states) is defaultdict
        assert own._per_optimizer_states[0] == {
            "stage": OptState.READY,
            "found_inf_per_device": {},
        }


@pytest.mark.parametrize("grads", [(1.0, 2.0), (1.0, INF), (float("nan"), 2.0)])
def test_each_private_step_gives_torchs_tensors(grads: tuple[float, ...]):
    results = []
    for cls in (TorchScaler, fastamp.GradScaler):
        scaler = make(cls)
        parameters, optimizer = trainable(*grads)
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        checked = scaler._check_inf_per_device(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        same_flags = all(checked[device] is found[device] for device in checked)
        flags = scaler._unscale_grads_(optimizer, torch.tensor(0.5), torch.zeros(()), False)
        state = {"stage": OptState.UNSCALED, "found_inf_per_device": flags}
        result = scaler._maybe_opt_step(optimizer, state)
        tensors = [*checked.values(), *flags.values(), *(p.grad for p in parameters)]
        tensors += [*(p.detach() for p in parameters), scaler._get_scale_async()]
        results.append((tensors, list(flags), same_flags, result))
    (torchs, *torchs_facts), (own, *own_facts) = results
    assert own_facts == torchs_facts
    for a, b in zip(own, torchs, strict=True):
        assert a.dtype == b.dtype
        assert a.numel() == b.numel()
        torch.testing.assert_close(a.view_as(b), b, rtol=0, atol=0, equal_nan=True)


def test_per_optimizer_states_is_live_writes_and_clears_count():
    _, optimizer = trainable(INF)
    scaler = make(fastamp.GradScaler)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert state["stage"] is OptState.UNSCALED
    state["found_inf_per_device"] = {torch.device("cpu"): torch.zeros(())}
    scaler.update()
    assert scaler.get_scale() == 8.0
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states.clear()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def test_a_step_that_a_subclass_replaces_is_called():
    class Counting(fastamp.GradScaler):
        calls = 0

        def _maybe_opt_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            Counting.calls += 1
            return super()._maybe_opt_step(optimizer, *args, **kwargs)

    parameters, optimizer = trainable(8.0)
    scaler = make(Counting)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert Counting.calls == 1
    assert parameters[0].tolist() == [0.0, 0.0]


def test_isinstance_holds_both_ways_in():
    with fastamp.install():
        objects = [torch.autocast("cpu"), torch.amp.GradScaler("cpu")]
    objects += [fastamp.autocast("cpu"), fastamp.GradScaler("cpu")]
    for region, scaler in zip(objects[::2], objects[1::2], strict=True):
        assert isinstance(region, torch.autocast)
        assert isinstance(region, torch.amp.autocast_mode.autocast)
        assert isinstance(scaler, torch.amp.GradScaler)
        assert isinstance(scaler, fastamp.GradScaler)
    assert issubclass(fastamp.autocast, torch.autocast)
    assert issubclass(fastamp.cuda.amp.GradScaler, torch.cuda.amp.GradScaler)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float16}, {"enabled": False}])
def test_regions_have_the_attributes_that_dynamo_reads(options: dict[str, Any]):
    torchs, own = torch.autocast("cpu", **options), fastamp.autocast("cpu", **options)
    for name in ("device", "fast_dtype", "_enabled", "_cache_enabled"):
        assert getattr(own, name) == getattr(torchs, name)
