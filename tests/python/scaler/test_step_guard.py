# SPDX-License-Identifier: Apache-2.0
"""StepGuard: steps without a scaler are the optimizer's own, or change nothing."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
import fastamp.optim
from fastamp import StepGuard

NAN, INF = float("nan"), float("inf")


class Own(torch.optim.Optimizer):
    """An optimizer that nobody knows."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    p.data.sub_(p.grad, alpha=group["lr"])
        return loss


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "torch fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "torch Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "own": lambda p: Own(p, {"lr": 0.1}),
    "fastamp SGD": lambda p: fastamp.optim.SGD(p, lr=0.1, momentum=0.9),
    "fastamp AdamW": lambda p: fastamp.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: fastamp.optim.fuse_(torch.optim.AdamW(p, lr=0.01)),
}
ON_DEVICE = {"fastamp SGD", "fastamp AdamW", "fused AdamW", "torch fused Adam"}


@pytest.fixture(params=MAKERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Job:
    """A model, its optimizer, and a backward pass whose gradients may be spoilt."""

    def __init__(self, kind: str, guarded: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))
        self.optimizer = MAKERS[kind](self.model.parameters())
        self.guard = StepGuard(self.optimizer, **options) if guarded else None
        self.x = torch.randn(4, 6)

    def backward(self, spoilt_by: float | None = None, parameter: str = "2.weight") -> torch.Tensor:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model(self.x).float().square().mean()
        loss.backward()
        if spoilt_by is not None:
            gradient = self.model.get_parameter(parameter).grad
            assert gradient is not None
            gradient.view(-1)[1] = spoilt_by
        return loss

    def bits(self) -> list[Any]:
        state = self.optimizer.state_dict()["state"]
        tensors: list[Any] = [p.detach().clone() for p in self.model.parameters()]
        for key in sorted(state):
            tensors += [copy.deepcopy(value) for _, value in sorted(state[key].items())]
        return tensors


def assert_bits(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(
                a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b
            )
        else:
            assert a == b


def clip_by_torch(job: Job) -> None:
    torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.05)


@pytest.mark.parametrize("clips", [False, True])
def test_finite_steps_have_the_bits_of_steps_without_a_guard(kind: str, clips: bool):
    guarded, plain = Job(kind), Job(kind, guarded=False)
    for _ in range(5):
        for job in (guarded, plain):
            job.backward()
            if clips:
                clip_by_torch(job)
            job.optimizer.step()
        assert_bits(guarded.bits(), plain.bits())
    assert guarded.guard is not None
    assert not guarded.guard.step_was_skipped
    for p, q in zip(guarded.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_step_with_one_bad_element_changes_no_bit(kind: str, value: float):
    job = Job(kind)
    assert job.guard is not None
    for _ in range(2):
        job.backward()
        job.optimizer.step()
    before = job.bits()
    job.backward(value)
    job.optimizer.step()
    assert_bits(job.bits(), before)
    assert job.guard.step_was_skipped
    assert job.guard.skipped_in_a_row == 1
    job.backward()
    job.optimizer.step()
    assert not job.guard.step_was_skipped
    assert not torch.equal(job.bits()[0], before[0])
    unspoilt = Job(kind, guarded=False)
    for _ in range(3):
        unspoilt.backward()
        unspoilt.optimizer.step()
    assert_bits(job.bits(), unspoilt.bits())


def test_a_first_step_that_is_skipped_leaves_parameters(kind: str):
    job = Job(kind)
    before = [p.detach().clone() for p in job.model.parameters()]
    job.backward(NAN)
    job.optimizer.step()
    assert_bits([p.detach() for p in job.model.parameters()], before)


@pytest.mark.parametrize("clips", [False, True])
def test_where_the_device_decides_the_host_reads_nothing(
    kind: str, clips: bool, monkeypatch: pytest.MonkeyPatch
):
    job = Job(kind)
    assert job.guard is not None
    reads = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda t: reads.append(t.shape) or item(t))
    for value in (None, NAN, None):
        job.backward(value)
        reads.clear()
        if clips:
            job.guard.clip_grad_norm_(0.1)
        job.optimizer.step()
        # torch's AdamW and Adagrad read their own step counts, one for each of the parameters.
        by_optimizer = 4 if value is None and kind in ("torch AdamW", "torch Adagrad") else 0
        assert len(reads) - by_optimizer == (0 if kind in ON_DEVICE else 1)


def test_the_guards_clip_is_torchs(kind: str):
    guarded, plain = Job(kind), Job(kind, guarded=False)
    assert guarded.guard is not None
    for _ in range(4):
        guarded.backward()
        norm = guarded.guard.clip_grad_norm_(0.05)
        guarded.optimizer.step()
        plain.backward()
        torchs = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.05)
        plain.optimizer.step()
        torch.testing.assert_close(norm, torchs, rtol=1e-6, atol=0)
        for p, q in zip(guarded.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-9)


def test_clips_by_value_after_clips_by_norm(kind: str):
    guarded, plain = Job(kind), Job(kind, guarded=False)
    assert guarded.guard is not None
    guarded.backward()
    guarded.guard.clip_grad_norm_(0.05, norm_type=INF)
    guarded.guard.clip_grad_value_(0.01)
    guarded.optimizer.step()
    plain.backward()
    torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.05, INF)
    torch.nn.utils.clip_grad_value_(plain.model.parameters(), 0.01)
    plain.optimizer.step()
    for p, q in zip(guarded.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_the_guards_clip_keeps_what_is_reported(kind: str):
    job = Job(kind)
    assert job.guard is not None
    job.backward(NAN)
    assert math.isnan(job.guard.clip_grad_norm_(0.1).item())
    job.optimizer.step()
    (row,) = job.guard.overflow_report(job.model).gradients
    assert (row.name, row.inf, row.nan) == ("2.weight", 0, 1)
    job.backward(NAN)
    with pytest.raises(RuntimeError, match="finite"):
        job.guard.clip_grad_norm_(0.1, error_if_nonfinite=True)


def test_a_closure_is_called_once_before_the_check(kind: str):
    guarded, plain = Job(kind), Job(kind, guarded=False)
    assert guarded.guard is not None
    calls: list[bool] = []

    def closure(job: Job, value: float | None = None) -> Any:
        calls.append(torch.is_grad_enabled())
        return job.backward(value)

    before = guarded.bits()
    loss = guarded.optimizer.step(closure=lambda: closure(guarded, NAN))
    assert torch.is_tensor(loss)
    assert guarded.guard.step_was_skipped
    assert_bits(guarded.bits()[:4], before[:4])
    fresh = Job(kind)
    for job in (fresh, plain):
        with torch.no_grad():
            job.optimizer.step(lambda job=job: closure(job))
    assert_bits(fresh.bits(), plain.bits())
    assert calls == [True] * 3


def test_a_loss_that_is_not_finite_skips_one_step(kind: str):
    job = Job(kind)
    assert job.guard is not None
    for value, skipped in ((1.0, False), (NAN, True), (1.0, False), (INF, True)):
        before = job.bits()
        job.backward()
        job.guard.check_loss(torch.tensor(value, dtype=torch.bfloat16))
        job.optimizer.step()
        assert job.guard.step_was_skipped is skipped
        assert not job.guard.overflow_report().gradients
        if skipped and len(before) == len(job.bits()):
            assert_bits(job.bits(), before)


def test_a_report_after_a_loss_does_not_repeat_an_earlier_one():
    job = Job("fastamp AdamW")
    assert job.guard is not None
    job.backward(INF)
    job.optimizer.step()
    assert [row.name for row in job.guard.overflow_report(job.model).gradients] == ["2.weight"]
    job.backward()
    job.guard.check_loss(torch.tensor(NAN))
    job.optimizer.step()
    report = job.guard.overflow_report(job.model)
    assert (report.step, report.gradients) == (1, [])
    job.backward(NAN)
    job.optimizer.step()
    assert job.guard.overflow_report(job.model).gradients[0].nan == 1


def test_history_hooks_and_reports_have_the_scalers_words(kind: str):
    notified: list[Any] = []
    job = Job(kind, on_skip=lambda *about: notified.append(about))
    assert job.guard is not None
    handle = job.guard.register_on_skip(lambda *_: notified.append("second"))
    for value in (None, NAN, INF, None):
        job.backward(value)
        job.optimizer.step()
    history = job.guard.history()
    assert [(row.step, row.skipped) for row in history] == [
        (0, False),
        (1, True),
        (2, True),
        (3, False),
    ]
    assert {row.scale for row in history} == {1.0}
    gradients = [p.grad.flatten() for p in job.model.parameters() if p.grad is not None]
    assert history[-1].norm == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-6)
    assert [type(each) is tuple and each[:2] for each in notified[::2]] == [
        (job.optimizer, 1.0)
    ] * 2
    assert notified[0][2].step == 1
    assert notified[1] == "second"
    handle.remove()
    job.backward(NAN)
    job.optimizer.step()
    assert notified.count("second") == 2
    assert len(notified) == 5
    report = job.guard.overflow_report(job.model)
    assert str(report).startswith("Step 4 was skipped: 1 gradient with inf or NaN.")
    assert report.scale is None
    assert "rank" not in report.as_dict()["gradients"][0]


def test_rows_go_to_a_logger(kind: str):
    rows: list[tuple[dict[str, float], int]] = []
    job = Job(kind)
    with fastamp.debug.log_to(lambda values, step: rows.append((values, step)), job.guard):
        for value in (None, NAN):
            job.backward(value)
            job.optimizer.step()
    assert [step for _, step in rows] == [0, 1]
    assert [values["amp/skipped"] for values, _ in rows] == [0.0, 1.0]
    assert rows[1][0]["amp/overflows"] == 1
    assert "amp/norm" in rows[0][0]
    assert "amp/scale" not in rows[0][0]


def test_a_logger_without_a_scaler_hears_of_guards():
    rows: list[int] = []
    with fastamp.debug.log_to(lambda _, step: rows.append(step)):
        job = Job("own")
        job.backward()
        job.optimizer.step()
    assert rows == [0]


def test_too_many_skips_in_a_row_are_an_error_that_names_parameters(kind: str):
    job = Job(kind, max_consecutive=1)
    named = Job(kind, guarded=False)
    StepGuard(named.optimizer, max_consecutive=0, named_parameters=named.model)
    for value in (NAN, None, NAN):
        job.backward(value)
        job.optimizer.step()
    job.backward(NAN)
    with pytest.raises(RuntimeError, match=r"at most 1 .* got 2\. (.|\n)*parameter 2"):
        job.optimizer.step()
    before = named.bits()
    named.backward(INF)
    with pytest.raises(RuntimeError, match=r"at most 0 .* got 1(.|\n)*2\.weight"):
        named.optimizer.step()
    assert_bits(named.bits()[:4], before[:4])
    job.backward()
    job.optimizer.step()  # It goes on.
    assert job.guard is not None
    assert job.guard.skipped_in_a_row == 0


def test_many_skips_in_a_row_are_warned_of_once():
    job = Job("fastamp SGD")

    def skip(times: int) -> None:
        for _ in range(times):
            job.backward(NAN)
            job.optimizer.step()

    with pytest.warns(UserWarning, match=r"StepGuard: 20 steps in a row were skipped") as seen:
        skip(25)
    assert len(seen) == 1


# -- spikes


def plain_rule(norms: list[float], factor: float, mean: bool, window: int) -> list[bool]:
    """The rule by its description, in float64."""
    finite: list[float] = []
    average, spikes = 0.0, []
    for norm in norms:
        typical = average
        if not mean and finite:
            last = sorted(finite[-window:])
            typical = last[(len(last) - 1) // 2]
        warm = len(finite) >= min(window, 16)
        spikes.append(warm and norm > factor * typical)
        if math.isfinite(norm):
            taken = min(norm, factor * typical) if warm else norm
            average += (taken - average) / min(len(finite) + 1, window)
            finite.append(norm)
    return spikes


def step_of_norm(optimizer: torch.optim.Optimizer, norm: float) -> None:
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.full_like(parameter, norm / 2)
    optimizer.step()


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("window", [2, 5, 24])
@pytest.mark.parametrize("maker", ["own", "fastamp SGD"])
def test_spikes_are_those_of_the_rule(mean: bool, window: int, maker: str):
    generator = torch.Generator().manual_seed(window)
    norms = torch.rand(60, generator=generator).add(0.5).exp()
    norms[20::7] *= 20
    norms[33] = INF
    optimizer = MAKERS[maker]([nn.Parameter(torch.zeros(4))])
    options = {"spike_of": "mean" if mean else "median", "spike_window": window}
    guard = StepGuard(optimizer, skip="spike", spike_factor=3.0, **options)
    found = []
    for i, norm in enumerate(norms.tolist()):
        if i == 30:  # A checkpoint in the middle.
            state = pickle.loads(pickle.dumps(guard.state_dict()))
            guard.release()
            guard = StepGuard(optimizer, skip="spike", spike_factor=3.0, **options)
            guard.load_state_dict(state)
        before = optimizer.param_groups[0]["params"][0].detach().clone()
        step_of_norm(optimizer, norm)
        found.append(guard.step_was_skipped)
        assert torch.equal(before, optimizer.param_groups[0]["params"][0]) is found[-1]
    wanted = plain_rule(norms.tolist(), 3.0, mean, window)
    wanted[33] = True
    assert found == wanted
    assert sum(wanted) > 3


def test_a_hook_gets_the_row_that_the_history_has_of_a_spike():
    rows: list[Any] = []
    weight = nn.Parameter(torch.ones(4))
    optimizer = fastamp.optim.SGD([weight], lr=0.1)
    guard = StepGuard(optimizer, skip="spike", on_skip=lambda *args: rows.append(args[2]))
    for step in range(20):
        weight.grad = torch.full((4,), 1000.0 if step == 18 else 1.0)
        optimizer.step()
    assert rows == [guard.history()[18]]
    assert rows[0].norm == 2000.0


def test_spikes_are_skipped_only_on_request():
    optimizer = MAKERS["fastamp SGD"]([nn.Parameter(torch.zeros(4))])
    guard = StepGuard(optimizer)
    for norm in [1.0] * 20 + [1e6]:
        step_of_norm(optimizer, norm)
    assert not guard.step_was_skipped
    assert guard.state_dict()["spike"] is None


# -- states


def test_a_state_goes_on_where_it_was_saved():
    job = Job("fastamp AdamW", history_size=3)
    assert job.guard is not None
    for value in (None, None, NAN, NAN):
        job.backward(value)
        job.optimizer.step()
    state = pickle.loads(pickle.dumps(job.guard.state_dict()))
    other = Job("own", history_size=3)
    assert other.guard is not None
    other.guard.load_state_dict(state)
    assert other.guard.skipped_in_a_row == 2
    assert str(other.guard.history()) == str(job.guard.history())
    assert str(other.guard.overflow_report()) == str(job.guard.overflow_report())
    assert str(other.guard.state_dict()) == str(state)
    other.backward(NAN)
    other.optimizer.step()
    assert [row.step for row in other.guard.history()] == [2, 3, 4]
    assert other.guard.skipped_in_a_row == 3
    other.guard.load_state_dict(state)  # Of a guard that has stepped, too.
    assert other.guard.skipped_in_a_row == 2
    assert str(other.guard.history()) == str(job.guard.history())


BAD_STATES = [
    {},
    None,
    {"history": [], "overflow_report": None, "skipped_in_a_row": 0},
    {"history": [(0, 1.0)], "overflow_report": None, "skipped_in_a_row": 0, "spike": None},
    {"history": [], "overflow_report": 3, "skipped_in_a_row": 0, "spike": None},
    {"history": [], "overflow_report": None, "skipped_in_a_row": -1, "spike": None},
    {"history": [], "overflow_report": None, "skipped_in_a_row": 0, "spike": {"norms": [1.0]}},
    *(
        {
            "history": [],
            "overflow_report": None,
            "skipped_in_a_row": 0,
            "spike": {"norms": norms, "count": count},
        }
        for norms, count in (([1.0], 2), ([NAN], 1), ([-1.0], 1), ([1.0] * 9, 9), ([], -1))
    ),
]


@pytest.mark.parametrize("state", BAD_STATES, ids=range(len(BAD_STATES)))
def test_what_is_no_state_is_refused_and_changes_nothing(state: Any):
    job = Job("fastamp SGD", skip="spike", spike_window=8)
    assert job.guard is not None
    job.backward()
    job.optimizer.step()
    before = job.guard.state_dict()
    with pytest.raises(ValueError, match=r"^load_state_dict: expected"):
        job.guard.load_state_dict(state)
    assert job.guard.state_dict() == before


# -- bad input


def test_an_optimizer_has_one_guard():
    job = Job("own")
    with pytest.raises(ValueError, match="without a guard, got one that has one"):
        StepGuard(job.optimizer)


BAD_OPTIONS = [
    ({"skip": "spikes"}, ValueError, "skip"),
    ({"skip": None}, ValueError, "skip"),
    ({"spike_of": "mode"}, ValueError, "spike_of"),
    ({"skip": "spike", "spike_factor": 1.0}, ValueError, "spike_factor"),
    ({"skip": "spike", "spike_factor": NAN}, ValueError, "spike_factor"),
    ({"skip": "spike", "spike_factor": "3"}, TypeError, "spike_factor"),
    ({"spike_factor": True}, TypeError, "spike_factor"),
    ({"spike_window": 1}, ValueError, "spike_window"),
    ({"spike_window": 65537}, ValueError, "spike_window"),
    ({"spike_window": 4.0}, TypeError, "spike_window"),
    ({"max_consecutive": -1}, ValueError, "max_consecutive"),
    ({"max_consecutive": 1.5}, TypeError, "max_consecutive"),
    ({"history_size": -1}, ValueError, "history_size"),
    ({"history_size": True}, TypeError, "history_size"),
    ({"on_skip": 3}, TypeError, "on_skip"),
    ({"named_parameters": 3}, TypeError, "named_parameters"),
    ({"group": "world"}, TypeError, "group"),
]


@pytest.mark.parametrize(("options", "error", "name"), BAD_OPTIONS, ids=str)
def test_bad_options_are_refused_and_leave_the_optimizer_alone(
    options: dict[str, Any], error: type[Exception], name: str
):
    job = Job("torch SGD", guarded=False)
    with pytest.raises(error, match=rf"^StepGuard: expected .*{name}"):
        StepGuard(job.optimizer, **options)
    assert "step" not in vars(job.optimizer)
    StepGuard(job.optimizer)


def test_what_cannot_be_guarded_is_refused():
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match=r"^StepGuard: expected optimizer .*, got list"):
        StepGuard([parameter])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LBFGS"):
        StepGuard(torch.optim.LBFGS([parameter]))
    job = Job("torch SGD")
    with pytest.raises(ValueError, match="without a guard"):
        StepGuard(job.optimizer)


def test_bad_arguments_of_methods_are_refused():
    job = Job("fastamp SGD")
    guard = job.guard
    assert guard is not None
    with pytest.raises(TypeError, match=r"^check_loss: expected .*, got float"):
        guard.check_loss(1.0)  # type: ignore[arg-type]
    for loss in (torch.ones(2), torch.ones((), dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"^check_loss: expected"):
            guard.check_loss(loss)
    with pytest.raises(ValueError, match=r"^clip_grad_value_: expected clip_value >= 0"):
        guard.clip_grad_value_(-1.0)
    with pytest.raises(TypeError, match=r"^register_on_skip"):
        guard.register_on_skip(3)  # type: ignore[arg-type]
    guard.release()
    guard.release()
    for call in (lambda: guard.clip_grad_norm_(1.0), lambda: guard.check_loss(torch.ones(()))):
        with pytest.raises(RuntimeError, match="released"):
            call()


# -- under other code


def test_a_released_guard_lets_everything_pass(kind: str):
    job, plain = Job(kind), Job(kind, guarded=False)
    assert job.guard is not None
    job.guard.release()
    assert "step" not in vars(job.optimizer)
    for each in (job, plain):
        each.backward()
        each.optimizer.step()
    assert_bits(job.bits(), plain.bits())
    StepGuard(job.optimizer)


@pytest.mark.parametrize("first", ["guard", "scheduler"])
def test_schedulers_see_guarded_steps(kind: str, first: str, recwarn: pytest.WarningsRecorder):
    job, plain = Job(kind, guarded=False), Job(kind, guarded=False)
    guard = StepGuard(job.optimizer) if first == "guard" else None
    schedulers = [torch.optim.lr_scheduler.StepLR(j.optimizer, 1, 0.5) for j in (job, plain)]
    guard = guard or StepGuard(job.optimizer)
    for _ in range(3):
        for each, scheduler in zip((job, plain), schedulers, strict=True):
            each.backward()
            each.optimizer.step()
            scheduler.step()
    assert_bits(job.bits(), plain.bits())
    before = job.bits()
    job.backward(NAN)
    job.optimizer.step()
    assert guard.step_was_skipped
    assert_bits(job.bits(), before)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]
    guard.release()
    job.backward(NAN)
    job.optimizer.step()
    assert not torch.isfinite(job.bits()[2]).all()


def test_hooks_of_steps_run_once_and_not_for_skipped_host_steps():
    for kind in ("torch SGD", "fastamp SGD"):
        job = Job(kind)
        calls: list[str] = []
        job.optimizer.register_step_pre_hook(lambda *_, c=calls: c.append("before"))
        job.optimizer.register_step_post_hook(lambda *_, c=calls: c.append("after"))
        job.backward()
        job.optimizer.step()
        assert calls == ["before", "after"], kind
        before = job.bits()
        job.backward(NAN)
        job.optimizer.step()
        assert_bits(job.bits(), before)


def test_an_optimizer_may_be_fused_under_its_guard():
    job = Job("torch AdamW")
    plain = Job("fused AdamW", guarded=False)
    fastamp.optim.fuse_(job.optimizer)
    for each in (job, plain):
        each.backward()
        each.optimizer.step()
    assert_bits(job.bits(), plain.bits())
    before = job.bits()
    job.backward(NAN)
    job.optimizer.step()
    assert_bits(job.bits(), before)


def test_under_a_scaler_its_decision_stands(kind: str):
    guarded, plain = Job(kind), Job(kind, guarded=False)
    for job in (guarded, plain):
        scaler = fastamp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for value in (None, NAN, None):
            job.optimizer.zero_grad()
            scaler.scale(job.model(job.x).square().mean()).backward()
            if value is not None:
                gradient = job.model.get_parameter("0.bias").grad
                assert gradient is not None
                gradient[0] = value
            scaler.step(job.optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
    assert_bits(guarded.bits(), plain.bits())


def test_copies_and_pickles_of_optimizers_are_not_guarded(kind: str):
    job = Job(kind)
    for other in (copy.deepcopy(job.optimizer), pickle.loads(pickle.dumps(job.optimizer))):
        assert "step" not in vars(other)
    job.backward(NAN)
    job.optimizer.step()
    assert job.guard is not None
    assert job.guard.step_was_skipped


def test_an_optimizer_goes_when_nobody_holds_it():
    job = Job("fastamp SGD")
    job.backward()
    job.optimizer.step()
    guard = job.guard
    assert guard is not None
    gone = weakref.ref(job.optimizer)
    gc.collect()
    gc.disable()
    try:
        del job
        assert gone() is None
    finally:
        gc.enable()
    assert guard.history()
    with pytest.raises(RuntimeError, match="gone"):
        guard.clip_grad_norm_(1.0)


def test_a_guard_that_nobody_holds_stays():
    job = Job("torch SGD")
    job.guard = None
    gc.collect()
    before = job.bits()
    job.backward(NAN)
    job.optimizer.step()
    assert_bits(job.bits()[:4], before[:4])


@pytest.mark.parametrize("set_to_none", [False, True])
def test_what_a_broken_iteration_clipped_is_forgotten(kind: str, set_to_none: bool):
    guarded, plain = Job(kind), Job(kind, guarded=False)
    assert guarded.guard is not None
    guarded.backward(NAN)
    guarded.guard.clip_grad_norm_(1e-6)
    for job in (guarded, plain):  # The iteration was broken off here.
        job.optimizer.zero_grad(set_to_none=set_to_none)
        job.model(job.x).square().mean().backward()
    guarded.guard.clip_grad_norm_(0.05)
    torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.05)
    for job in (guarded, plain):
        job.optimizer.step()
    assert not guarded.guard.step_was_skipped
    for p, q in zip(guarded.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("maker", ["torch SGD", "fastamp SGD"])
def test_what_a_step_that_raises_was_to_do_is_forgotten(maker: str):
    optimizer = MAKERS[maker]([nn.Parameter(torch.ones(2))])
    guard = StepGuard(optimizer, skip="spike")
    (parameter,) = optimizer.param_groups[0]["params"]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = optimizer.register_step_pre_hook(interrupt)
    parameter.grad = torch.ones(2)
    guard.clip_grad_norm_(1e-3)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    hook.remove()
    assert guard.state_dict()["spike"] == {"norms": [], "count": 0}
    assert guard.history() == []
    parameter.grad.fill_(1.0)
    optimizer.step()  # The clip went with its step.
    assert torch.equal(parameter, torch.full((2,), 0.9))
    parameter.grad.fill_(NAN)
    optimizer.step()
    assert [row.skipped for row in guard.history()] == [False, True]


def test_steps_without_gradients_are_the_optimizers_own(kind: str):
    job = Job(kind)
    assert job.guard is not None
    job.optimizer.step()
    assert job.guard.history() == []
    assert job.guard.clip_grad_norm_(1.0).item() == 0.0
    assert not job.guard.overflow_report()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_parameters_of_any_dtype(dtype: torch.dtype):
    for make in (MAKERS["torch SGD"], MAKERS["fastamp SGD"]):
        parameter = nn.Parameter(torch.ones(5, dtype=dtype))
        optimizer = make([parameter])
        guard = StepGuard(optimizer)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert not guard.step_was_skipped
        before = parameter.detach().clone()
        parameter.grad = torch.tensor([1, 2, NAN, 3, 4], dtype=dtype)
        optimizer.step()
        assert torch.equal(parameter, before)
        assert guard.overflow_report().gradients[0].nan == 1


def test_sparse_and_shared_gradients():
    embedding = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(list(embedding.parameters()))
    guard = StepGuard(optimizer)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    optimizer.step()
    assert not guard.step_was_skipped
    before = embedding.weight.detach().clone()
    optimizer.zero_grad()
    (embedding(torch.tensor([1, 1, 4])) * INF).sum().backward()
    guard.clip_grad_norm_(1.0)
    optimizer.step()
    assert guard.step_was_skipped
    assert torch.equal(embedding.weight, before)

    shared = torch.ones(3)
    for make in (MAKERS["torch SGD"], MAKERS["fastamp SGD"]):
        pair = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
        optimizer = make(pair)
        guard = StepGuard(optimizer)
        for value in (1.0, NAN):
            shared = torch.full((3,), value)
            pair[0].grad = pair[1].grad = shared
            optimizer.step()
            assert guard.step_was_skipped is math.isnan(value)
        assert torch.equal(pair[0], torch.full((3,), -0.1))
        assert torch.equal(pair[1], pair[0])


def test_compiled_steps_are_guarded():
    job = Job("torch SGD")
    assert job.guard is not None
    step = torch.compile(lambda: job.optimizer.step(), backend="eager")
    for value in (None, NAN):
        before = job.bits()
        job.backward(value)
        step()
        assert job.guard.step_was_skipped is (value is not None)
    assert_bits(job.bits()[:4], before[:4])
