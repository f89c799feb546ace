# SPDX-License-Identifier: Apache-2.0
"""register_on_skip: who is notified of skipped steps, of what and when."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from typing import Any

import pytest
import torch

import fastamp
from fastamp import optim
from support.scaler_steps import INF, model_and_optimizer, step

BAD = {"0.bias": [INF]}


def test_a_hook_gets_the_optimizer_the_scale_and_the_record():
    model, optimizer = model_and_optimizer()
    calls: list[Any] = []
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    scaler.register_on_skip(lambda *arguments: calls.append(arguments))
    for number, bad in enumerate((None, BAD, None, BAD)):
        step(scaler, model, optimizer, bad)
        assert len(calls) == (number + 1) // 2  # On the CPU by the update() of its own iteration.
    skipped = [row for row in scaler.history() if row.skipped]
    assert [(o, s) for o, s, _ in calls] == [(optimizer, 8.0), (optimizer, 4.0)]
    assert [record for _, _, record in calls] == skipped
    assert [record.step for record in skipped] == [1, 3]


def test_the_record_has_the_scale_that_a_program_wrote():
    model, optimizer = model_and_optimizer()
    records: list[Any] = []
    scaler = fastamp.GradScaler("cpu", init_scale=8.0, on_skip=lambda *a: records.append(a[2]))
    step(scaler, model, optimizer)
    scaler._scale.fill_(32.0)  # type: ignore[union-attr]
    step(scaler, model, optimizer, BAD)
    assert records == [row for row in scaler.history() if row.skipped]
    assert records[0].scale == 32.0


@pytest.mark.parametrize("make", [optim.SGD, torch.optim.SGD, optim.AdamW, torch.optim.AdamW])
def test_every_kind_of_optimizer_is_told_of(make):
    model, _ = model_and_optimizer()
    optimizer = make(model.parameters(), lr=0.1)
    notified: list[Any] = []
    scaler = fastamp.GradScaler("cpu", on_skip=lambda *arguments: notified.append(arguments[0]))
    for bad in (BAD, None, BAD):
        step(scaler, model, optimizer, bad)
    assert notified == [optimizer, optimizer]


def test_without_a_history_the_record_has_what_is_known():
    model, optimizer = model_and_optimizer()
    records: list[Any] = []
    scaler = fastamp.GradScaler(
        "cpu", init_scale=8.0, history_size=0, on_skip=lambda *a: records.append(a[2])
    )
    for bad in (None, BAD):
        step(scaler, model, optimizer, bad)
    (record,) = records
    assert record[:3] == (1, 8.0, True)
    assert math.isnan(record.norm)
    assert record.growth_tracker == 0


def test_each_optimizer_that_skipped_is_told_of_and_no_other():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in parameters]
    notified: list[Any] = []
    scaler = fastamp.GradScaler("cpu", init_scale=2.0, on_skip=lambda *a: notified.append(a[0]))
    scaler.scale(torch.ones(()))
    for parameter, value in zip(parameters, (math.inf, 1.0, math.nan), strict=True):
        parameter.grad = torch.tensor([value])
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert notified == []
    scaler.update()
    assert notified == [optimizers[0], optimizers[2]]


def test_hooks_may_use_the_scaler_and_what_they_make_known_is_told_afterwards():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=16.0)
    order: list[Any] = []

    def hook(_optimizer, scale, record):
        order.append((record.step, scale, scaler.step_was_skipped, scaler.get_scale()))
        if record.step == 0:
            step(scaler, model, optimizer, BAD)
            order.append("end of the first")

    scaler.register_on_skip(hook)
    step(scaler, model, optimizer, BAD)
    assert order == [(0, 16.0, True, 8.0), "end of the first", (1, 8.0, True, 4.0)]


def test_a_hook_may_set_the_scale():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=16.0)
    scaler.register_on_skip(lambda *_: scaler.update(1024.0))
    step(scaler, model, optimizer, BAD)
    assert scaler.get_scale() == 1024.0
    step(scaler, model, optimizer)
    assert [row.scale for row in scaler.history()] == [16.0, 1024.0]


def test_what_a_hook_raises_comes_out_of_update_when_that_is_done():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=16.0)
    after: list[int] = []

    def stop(_optimizer, _scale, record):
        if record.step == 1:
            raise KeyError("too often")

    scaler.register_on_skip(stop)
    scaler.register_on_skip(lambda _o, _s, record: after.append(record.step))
    step(scaler, model, optimizer, BAD)
    with pytest.raises(KeyError, match="too often"):
        step(scaler, model, optimizer, BAD)
    assert scaler.get_scale() == 4.0
    assert scaler.step_was_skipped
    step(scaler, model, optimizer, BAD)
    assert after == [0, 2]
    assert scaler.get_scale() == 2.0


def test_steps_known_together_are_told_in_order_and_an_exception_loses_none_of_them():
    model, optimizer = model_and_optimizer()
    second = torch.nn.Parameter(torch.zeros(1))
    other = torch.optim.SGD([second], lr=1.0)
    scaler = fastamp.GradScaler("cpu", init_scale=16.0)
    notified: list[Any] = []

    def hook(which, _scale, _record):
        notified.append(which)
        if which is optimizer:
            raise ValueError("once")

    scaler.register_on_skip(hook)
    scaler.scale(torch.ones(()))
    for parameter in (*model.parameters(), second):
        parameter.grad = torch.full_like(parameter, math.inf)
    scaler.step(optimizer)
    scaler.step(other)
    with pytest.raises(ValueError, match="once"):
        scaler.update()
    assert notified == [optimizer]
    scaler.get_scale_async()  # Any question goes on where it was broken off.
    assert notified == [optimizer, other]


def test_hooks_can_be_removed_also_within_a_call():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu")
    notified: list[str] = []
    handles: dict[str, Any] = {}

    def first(*_):
        notified.append("first")
        handles["first"].remove()
        handles["second"].remove()

    handles["first"] = scaler.register_on_skip(first)
    handles["second"] = scaler.register_on_skip(lambda *_: notified.append("second"))
    handles["third"] = scaler.register_on_skip(lambda *_: notified.append("third"))
    step(scaler, model, optimizer, BAD)
    assert notified == ["first", "third"]
    handles["third"].remove()
    step(scaler, model, optimizer, BAD)
    assert notified == ["first", "third"]


def test_a_hook_is_told_of_iterations_that_end_after_it_was_registered():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu")
    step(scaler, model, optimizer, BAD)
    steps: list[int] = []
    scaler.register_on_skip(lambda *a: steps.append(a[2].step), wait=True)
    assert scaler.step_was_skipped
    step(scaler, model, optimizer, BAD)
    assert steps == [1]


def test_hooks_are_not_copied_and_not_pickled():
    scaler = fastamp.GradScaler("cpu", on_skip=lambda *_: None)
    scaler.scale(torch.ones(()))
    model, optimizer = model_and_optimizer()
    for clone in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert not hasattr(clone, "_skip_hooks")
        step(clone, model, optimizer, BAD)
    assert vars(scaler).keys() == vars(torch.amp.GradScaler("cpu")).keys()


def test_a_hook_that_refers_to_its_scaler_leaves_it_collectable():
    model, optimizer = model_and_optimizer()

    def use_one():
        scaler = fastamp.GradScaler("cpu")
        scaler.register_on_skip(lambda *_: scaler.get_scale())
        step(scaler, model, optimizer, BAD)
        return weakref.ref(scaler)

    gone = use_one()
    gc.collect()
    assert gone() is None


def test_a_disabled_scaler_calls_nobody():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", enabled=False, on_skip=lambda *_: pytest.fail("called"))
    scaler.register_on_skip(lambda *_: pytest.fail("called"))
    step(scaler, model, optimizer, BAD)


def test_wrong_hooks_are_refused():
    scaler = fastamp.GradScaler("cpu")
    with pytest.raises(TypeError, match="register_on_skip: expected hook to be callable, got int"):
        scaler.register_on_skip(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="register_on_skip: expected wait to be a bool, got int"):
        scaler.register_on_skip(print, wait=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="GradScaler: expected on_skip to be callable, got str"):
        fastamp.GradScaler("cpu", on_skip="stop")  # type: ignore[arg-type]
    assert not hasattr(scaler, "_skip_hooks")


@pytest.mark.parametrize("wait", [False, True])
def test_where_the_answer_comes_late_nobody_waits_unless_asked_to(wait):
    records: list[Any] = []
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    scaler.register_on_skip(lambda *a: records.append((a[0], a[2].step, a[1])), wait=wait)
    scaler.scale(torch.ones(()))
    # float64 scalars are read on demand only, as what is on its way from a GPU.
    for number in range(3):
        flags = [torch.tensor(float(number != 1), dtype=torch.float64) for _ in range(2)]
        scaler._per_optimizer_states[0]["found_inf_per_device"] = dict(enumerate(flags))
        scaler.update()
        scaler.get_scale_async()
        assert len(records) == ((number + 2) // 2 if wait else 0)
    assert scaler.step_was_skipped
    assert records == [(None, 0, 8.0), (None, 2, 4.0)]  # Whose flags they are is not known.


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("wait", [False, True])
def test_on_cuda_a_step_with_an_amp_step_is_told_of_late_unless_asked_to_wait(wait):
    model = torch.nn.Linear(2, 2, device="cuda")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    steps: list[int] = []
    scaler = fastamp.GradScaler("cuda")
    scaler.register_on_skip(lambda *a: steps.append(a[2].step), wait=wait)
    scaler.scale(torch.ones((), device="cuda"))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    scaler.step(optimizer)
    scaler.update()
    if wait:
        assert steps == [0]
    assert scaler.step_was_skipped
    assert steps == [0]
