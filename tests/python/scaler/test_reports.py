# SPDX-License-Identifier: Apache-2.0
"""What the scaler shows: skips, the scale, overflow reports, history, the warning."""

import gc
import warnings

import pytest
import torch

import fastamp
from support import scaler_steps
from support.scaler_steps import INF, NAN, give_gradients, model_and_optimizer, step


def test_skips_are_told_after_step_and_after_update_per_optimizer():
    model, optimizer = model_and_optimizer()
    other = torch.nn.Parameter(torch.ones(2))
    second = torch.optim.Adam([other])
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    assert not scaler.step_was_skipped
    assert not scaler.step_was_skipped_for(optimizer)
    for bad, other_bad in ((None, False), ({"0.bias": [NAN]}, False), (None, True), (None, False)):
        scaler.scale(torch.ones(()))
        give_gradients(model, bad)
        other.grad = torch.full((2,), INF if other_bad else 1.0)
        scaler.step(optimizer)
        assert scaler.step_was_skipped == (bad is not None)
        scaler.step(second)
        for _ in range(2):
            assert scaler.step_was_skipped == (bad is not None or other_bad)
            assert scaler.step_was_skipped_for(optimizer) == (bad is not None)
            assert scaler.step_was_skipped_for(second) == other_bad
            if scaler._per_optimizer_states:
                scaler.update()
    assert not scaler.step_was_skipped_for(torch.optim.SGD([other]))


def test_a_learning_rate_schedule_stays_in_step_with_the_steps_taken():
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    for bad in (None, {"0.bias": [INF]}, None, {"0.bias": [INF]}):
        step(scaler, model, optimizer, bad)
        if not scaler.step_was_skipped:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.25)


def test_the_scale_arrives_without_waiting():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    assert scaler.get_scale_async() == 4.0
    for bad, expected in ((None, 8.0), ({"0.bias": [INF]}, 4.0)):
        step(scaler, model, optimizer, bad)
        assert scaler.get_scale_async() == scaler.get_scale() == expected
    scaler.update(32.0)
    assert scaler.get_scale_async() == 32.0
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert scaler.get_scale_async() == 2.0
    assert fastamp.GradScaler("cpu", enabled=False).get_scale_async() == 1.0


def test_an_overflow_report_names_and_counts():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    assert not scaler.overflow_report()
    assert str(scaler.overflow_report()) == "No step was skipped."
    step(scaler, model, optimizer)
    assert not scaler.overflow_report()
    step(scaler, model, optimizer, {"0.weight": [INF, -INF, NAN], "1.bias": [NAN]})
    for _ in range(3):  # Clean steps leave the report as it is.
        report = scaler.overflow_report(model.named_parameters())
        assert report
        assert (report.step, report.scale) == (1, 8.0)
        assert [(g.name, g.index, g.shape, g.inf, g.nan) for g in report.gradients] == [
            ("0.weight", 0, (4, 3), 2, 1),
            ("1.bias", 3, (2,), 0, 1),
        ]
        step(scaler, model, optimizer)
    text = str(report)
    assert "Step 1 was skipped at scale 8: 2 gradients with inf or NaN." in text
    assert "0.weight  (4, 3)  inf 2  NaN 1" in text
    assert scaler.overflow_report(model).as_dict() == report.as_dict()
    assert scaler.overflow_report().gradients[1].name == "parameter 3"
    with pytest.raises(TypeError, match=r"overflow_report: .* got a Parameter in a generator"):
        scaler.overflow_report(model.parameters())
    with pytest.raises(TypeError, match=r"overflow_report: .* got a str in a str"):
        scaler.overflow_report("model")
    with pytest.raises(TypeError, match=r"overflow_report: expected named_parameters .* got int"):
        scaler.overflow_report(3)


def test_names_come_from_the_optimizer_if_it_has_them():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    step(scaler, model, optimizer, {"bias": [INF]})
    assert [g.name for g in scaler.overflow_report().gradients] == ["bias"]


def test_a_report_between_step_and_update_is_of_this_step():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    step(scaler, model, optimizer, {"0.bias": [INF]})
    scaler.scale(torch.ones(()))
    give_gradients(model, {"1.bias": [NAN, NAN]})
    scaler.unscale_(optimizer)
    report = scaler.overflow_report(model)
    assert report.step == 1
    assert [(g.name, g.nan) for g in report.gradients] == [("1.bias", 2)]


def test_positions_are_right_where_some_parameters_have_no_gradient():
    model, optimizer = model_and_optimizer()
    names = [name for name, _ in model.named_parameters()]
    scaler = fastamp.GradScaler("cpu", init_scale=2.0**60)
    for absent in (*names, None):
        for bad in names:
            if bad == absent:
                continue
            scaler.scale(torch.ones(()))
            give_gradients(model, {bad: [INF]})
            if absent is not None:
                dict(model.named_parameters())[absent].grad = None
            scaler.step(optimizer)
            scaler.update()
            report = scaler.overflow_report(model)
            assert [(g.name, g.inf) for g in report.gradients] == [(bad, 1)]
            last = bad
        step(scaler, model, optimizer)  # A clean step over another set of gradients.
        assert [g.name for g in scaler.overflow_report(model).gradients] == [last]


def test_sparse_gradients_are_reported():
    weight = torch.nn.Parameter(torch.zeros(5, 2))
    weight.grad = torch.sparse_coo_tensor([[1, 3]], torch.tensor([[1.0, NAN], [INF, 1.0]]), (5, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    (gradient,) = scaler.overflow_report().gradients
    assert (gradient.inf, gradient.nan, gradient.shape) == (1, 1, (5, 2))


def test_a_report_outlives_the_optimizer():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu")
    step(scaler, model, optimizer, {"1.bias": [INF]})
    del optimizer
    (gradient,) = scaler.overflow_report(model).gradients
    assert (gradient.name, gradient.index, gradient.shape) == ("parameter 3", 3, None)


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_fused_optimizers_are_reported_too(fused):
    model, optimizer = model_and_optimizer(torch.optim.AdamW, fused=fused)
    scaler = fastamp.GradScaler("cpu", init_scale=8.0)
    step(scaler, model, optimizer, {"1.bias": [INF]})
    assert scaler.step_was_skipped
    assert [g.name for g in scaler.overflow_report(model).gradients] == ["1.bias"]


def test_one_warning_when_the_scale_falls_below_one():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    bad = {"0.bias": [INF]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(scaler, model, optimizer, bad)  # 1 is not below 1.
    with pytest.warns(UserWarning, match=r"fell below 1 .*overflow_report.*history") as caught:
        step(scaler, model, optimizer, bad)
    assert caught[0].filename == scaler_steps.__file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            step(scaler, model, optimizer, bad)


def test_one_warning_after_many_skips_in_a_row():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=2.0**60)
    bad = {"0.bias": [INF]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(19):
            step(scaler, model, optimizer, bad)
        step(scaler, model, optimizer)  # One clean step begins the count again.
        for _ in range(19):
            step(scaler, model, optimizer, bad)
    with pytest.warns(UserWarning, match="20 steps in a row were skipped"):
        step(scaler, model, optimizer, bad)


def test_a_scale_that_starts_below_one_is_nobodys_warning():
    model, optimizer = model_and_optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = fastamp.GradScaler("cpu", init_scale=0.5)
        for _ in range(5):
            step(scaler, model, optimizer, {"0.bias": [INF]})


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_answers_on_cuda_are_the_same_and_arrive_without_a_sync():
    model, optimizer = model_and_optimizer()
    model.cuda()
    scaler = fastamp.GradScaler("cuda", init_scale=8.0, growth_interval=2)
    skipped = []
    for bad in (None, {"0.bias": [INF]}, None, {"1.bias": [NAN]}):
        scaler.scale(torch.ones((), device="cuda"))
        give_gradients(model, bad)
        scaler.step(optimizer)
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.update()
            scaler.get_scale_async()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        skipped.append(scaler.step_was_skipped)
        assert scaler.get_scale_async() == scaler.get_scale()
    assert skipped == [False, True, False, True]
    assert [g.name for g in scaler.overflow_report(model).gradients] == ["1.bias"]
    assert [row.skipped for row in scaler.history()] == skipped


def test_a_report_says_why_it_has_positions_instead_of_names():
    model, optimizer = model_and_optimizer()
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    step(scaler, model, optimizer, {"0.bias": [NAN]})
    named = str(scaler.overflow_report(model))
    assert "0.bias" in named
    assert "gone" not in named
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    unnamed = str(scaler.overflow_report(model))
    assert "parameter 1" in unnamed
    assert "The optimizer is gone" in unnamed
