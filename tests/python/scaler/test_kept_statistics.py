# SPDX-License-Identifier: Apache-2.0
"""restore_on_skip: running statistics of batch norms are those of the steps that were taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fastamp
import fastamp.optim
from fastamp._scaler.kept_statistics import SavedStatistics

NAN = float("nan")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5),
        nn.BatchNorm1d(5),
        nn.ReLU(),
        nn.Linear(5, 4),
        nn.BatchNorm1d(4, momentum=None),
    )


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


class Guarded:
    """Steps under a guard."""

    def __init__(self, model: nn.Module, make: Any) -> None:
        self.optimizer = make(model.parameters(), lr=0.1)
        self.decides = fastamp.StepGuard(self.optimizer)

    def step(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()


class Scaled:
    """Steps of a scaler."""

    def __init__(self, model: nn.Module, make: Any) -> None:
        self.optimizer = make(model.parameters(), lr=0.1)
        self.decides = fastamp.GradScaler("cpu", init_scale=4.0)

    def step(self, loss: torch.Tensor) -> None:
        self.decides.scale(loss).backward()
        self.decides.step(self.optimizer)
        self.decides.update()


def train(model: nn.Module, kind: Any, make: Any, history: list[float], restores: bool) -> Any:
    job = kind(model, make)
    handle = job.decides.restore_on_skip(model) if restores else None
    generator = torch.Generator().manual_seed(1)
    for value in history:
        job.optimizer.zero_grad()
        loss = torch.zeros(())
        for _ in range(2):  # Two micro-batches.
            x = torch.randn(8, 6, generator=generator)
            x[2, 3] = x[2, 3] * value
            loss = loss + model(x).square().mean()
        job.step(loss)
    return job, handle


def skip_a_step(job: Any, model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Checks that after a step that is skipped statistics are what is expected."""
    job.optimizer.zero_grad()
    job.step(model(torch.full((8, 6), NAN)).square().mean())
    assert job.decides.step_was_skipped
    for name, buffer in statistics(model).items():
        assert torch.equal(buffer, expected[name]), name


@pytest.mark.parametrize("kind", [Guarded, Scaled])
@pytest.mark.parametrize("make", [torch.optim.SGD, fastamp.optim.SGD])
def test_statistics_are_those_before_a_skipped_step(kind: Any, make: Any):
    model = network()
    job, _ = train(model, kind, make, [1.0, 1.0], restores=True)
    before = statistics(model)
    skip_a_step(job, model, before)
    assert before["1.num_batches_tracked"] == 4


@pytest.mark.parametrize("kind", [Guarded, Scaled])
def test_finite_runs_have_the_same_statistics(kind: Any):
    own, torchs = network(), network()
    train(own, kind, torch.optim.SGD, [1.0] * 3, restores=True)
    train(torchs, kind, torch.optim.SGD, [1.0] * 3, restores=False)
    for (name, a), b in zip(own.state_dict().items(), torchs.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("kind", [Guarded, Scaled])
def test_a_single_norm_has_what_was_before_a_skipped_step(kind: Any):
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
    job, _ = train(model, kind, torch.optim.SGD, [1.0], restores=True)
    before = statistics(model)
    job.optimizer.zero_grad()
    job.step(model(torch.full((8, 6), NAN)).square().mean())
    for name, buffer in statistics(model).items():
        assert torch.equal(buffer, before[name]), name


def test_only_on_request_and_until_it_is_taken_back():
    model = network()
    train(model, Guarded, torch.optim.SGD, [1.0, NAN], restores=False)
    assert model[1].running_mean.isnan().any()  # type: ignore[union-attr, operator]
    model = network()
    job, handle = train(model, Guarded, torch.optim.SGD, [1.0, NAN], restores=True)
    assert not model[1].running_mean.isnan().any()  # type: ignore[union-attr, operator]
    handle.remove()
    handle.remove()
    assert not model._forward_pre_hooks
    job.optimizer.zero_grad()
    job.step(model(torch.full((8, 6), NAN)).square().mean())
    assert model[1].running_mean.isnan().any()  # type: ignore[union-attr, operator]


def test_what_is_loaded_between_steps_is_what_comes_back():
    model, other = network(), network()
    with torch.no_grad():
        other[1].running_mean.fill_(3.0)  # type: ignore[union-attr, operator]
    job, _ = train(model, Guarded, fastamp.optim.SGD, [1.0], restores=True)
    model.load_state_dict(other.state_dict())
    model.eval()
    model(torch.ones(2, 6))  # An evaluation changes nothing, and saves nothing.
    model.train()
    job.optimizer.zero_grad()
    job.step(model(torch.full((8, 6), NAN)).square().mean())
    for name, buffer in statistics(model).items():
        assert torch.equal(buffer, other.get_buffer(name)), name


@pytest.mark.parametrize("decides", ["guard", "scaler"])
def test_bad_input_is_refused(decides: str):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: Any = fastamp.StepGuard(optimizer)
    made = made if decides == "guard" else fastamp.GradScaler("cpu")
    with pytest.raises(TypeError, match=r"^restore_on_skip: expected module .*, got list"):
        made.restore_on_skip([model])
    with pytest.raises(ValueError, match=r"^restore_on_skip: expected a module with running stat"):
        made.restore_on_skip(model)
    assert not model._forward_pre_hooks
    made.restore_on_skip(nn.InstanceNorm1d(3, track_running_stats=True))


@pytest.mark.parametrize("flags", [(0.0,), (1.0,), (0.0, 1.0), (NAN,)])
def test_what_a_device_does_without_the_host_is_the_same(flags: tuple[float, ...]):
    statistics = [torch.ones(2), torch.tensor(2), torch.full((2, 3), 5.0), torch.tensor([[4]])]
    before = [buffer.clone() for buffer in statistics]
    saved = SavedStatistics(statistics)
    after = [torch.full((2,), NAN), torch.tensor(3), torch.full((2, 3), NAN), torch.tensor([[-1]])]
    torch._foreach_copy_(statistics, after)
    saved.put_back_where(tuple(torch.tensor(flag) for flag in flags))
    expected = after if flags == (0.0,) else before
    for buffer, value in zip(statistics, expected, strict=True):
        torch.testing.assert_close(buffer, value, rtol=0, atol=0, equal_nan=True)


def test_a_norm_that_stands_twice_and_one_deep_inside_are_both_put_back():
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(norm, nn.Sequential(nn.ModuleList([norm])), nn.Sequential(network()))
    model[1].forward = lambda x: model[1][0][0](x)
    before = statistics(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = fastamp.StepGuard(optimizer)
    guard.restore_on_skip(model)
    (model(torch.randn(3, 6)).sum() * NAN).backward()
    assert not torch.equal(norm.running_mean, before["0.running_mean"])
    optimizer.step()
    after = statistics(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("kind", [Guarded, Scaled])
def test_policies_of_a_region_do_not_round_what_is_kept(kind: Any):
    model = network()
    with fastamp.policies.override({"cat": "lower"}):
        with torch.no_grad():  # More bits than bfloat16 has.
            model[1].running_mean.fill_(1 + 2**-20)  # type: ignore[union-attr, operator]
        job, _ = train(model, kind, torch.optim.SGD, [], restores=True)
        before = statistics(model)
        with fastamp.debug.trace() as trace, fastamp.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.full((8, 6), NAN)).square().mean()
        job.step(loss.float())
    assert job.decides.step_was_skipped
    for name, buffer in statistics(model).items():
        assert torch.equal(buffer, before[name]), name
    assert "cat" not in {row.op for row in trace.rows}


def export(model: nn.Module) -> None:
    torch.export.export(model, (torch.randn(4, 6),))


def run_on_fakes(model: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.randn(4, 6))


@pytest.mark.parametrize("kind", [Guarded, Scaled])
@pytest.mark.parametrize("use", [export, run_on_fakes])
def test_a_pass_without_values_is_not_what_comes_back(kind: Any, use: Any):
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    job, _ = train(model, kind, torch.optim.SGD, [1.0], restores=True)
    use(model)
    before = statistics(model)
    skip_a_step(job, model, before)


class Strict(torch.Tensor):
    """Refuses what joins or lists tensors, as DTensor does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "foreach" in func.__name__ or func.__name__ in ("cat", "flatten_dense_tensors"):
            raise NotImplementedError(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("on_device", [False, True])
def test_statistics_of_subclasses_have_a_copy_each(on_device: bool):
    values = [torch.ones(2), torch.ones(2).as_subclass(Strict), torch.tensor(3.0)]
    saved = SavedStatistics(values)
    for value in values:
        value.fill_(NAN)
    if on_device:
        saved.put_back_where((torch.ones(()),))
    else:
        saved.put_back()
    assert [value.tolist() for value in values] == [[1.0, 1.0], [1.0, 1.0], 3.0]
