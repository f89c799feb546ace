# SPDX-License-Identifier: Apache-2.0
"""The graphed step against the loop that a user would write by hand."""

from typing import Any

import pytest
import torch

import fastamp
import fastamp.optim
from fastamp import _C
from fastamp._scaler.graphed_step import constants_of
from support.scaler_pairs import bits

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
SHAPE, CLASSES = (8, 6), 3


def make(device, kind=None, lr=0.05, init_scale=2.0**10, dropout=0.0, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(SHAPE[1], 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(dropout),
        torch.nn.ReLU(),
        torch.nn.Linear(16, CLASSES),
    ).to(device)
    *others, last = model.parameters()
    groups = [{"params": others}, {"params": [last]}]
    optimizer = (kind or fastamp.optim.AdamW)(groups, lr=lr)
    scaler = fastamp.GradScaler(device, init_scale=init_scale, growth_interval=3, **options)
    return model, optimizer, scaler


def batches(device, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        inputs = torch.randn(SHAPE, generator=generator).to(device)
        targets = torch.randint(CLASSES, SHAPE[:1], generator=generator).to(device)
        yield inputs, targets


def loss_fn(output, targets):
    return torch.nn.functional.cross_entropy(output.float(), targets)


def by_hand(model, optimizer, scaler, group, dtype, max_norm, clip_value=None):
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets in group:
        with fastamp.autocast(inputs.device.type, dtype):
            output = model(inputs)
            loss = loss_fn(output, targets)
        loss = loss / len(group) if len(group) > 1 else loss
        scaler.scale(loss).backward()
        total += loss.item()
    if max_norm is not None:
        scaler.clip_grad_norm_(optimizer, max_norm)
    if clip_value is not None:
        scaler.clip_grad_value_(optimizer, clip_value)
    scaler.step(optimizer)
    scaler.update()
    return total


def assert_same(first, second, device):
    for left, right in zip(
        first[0].state_dict().values(), second[0].state_dict().values(), strict=True
    ):
        if device == "cpu" and left.dtype is torch.float32:
            assert bits(left) == bits(right)
        else:
            torch.testing.assert_close(left, right, equal_nan=True)  # Running means met an inf.
    assert first[2].state_dict() == second[2].state_dict()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_graphed_step_trains_as_the_loop_by_hand(device, accumulation, max_norm, name):
    kind = getattr(fastamp.optim, name)
    first, second = make(device, kind), make(device, kind)
    (sample,) = batches(device, 1)
    step = fastamp.cuda.graphed_step(
        first[0],
        loss_fn,
        *first[1:],
        sample,
        dtype=torch.bfloat16,
        accumulation=accumulation,
        max_norm=max_norm,
    )
    assert_same(first, second, device)  # Making it has changed nothing.
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for _, optimizer, _ in (first, second)
    ]
    data = list(batches(device, 10 * accumulation))
    for i in range(10):
        group = data[i * accumulation : (i + 1) * accumulation]
        if i == 5:
            group[0][0][0, 0] = float("inf")  # This step overflows.
        loss = step(*group[0]) if accumulation == 1 else step(*group)
        expected = by_hand(*second, group, torch.bfloat16, max_norm)
        assert loss.item() == pytest.approx(expected, rel=1e-5, nan_ok=True)
        assert first[2].step_was_skipped == second[2].step_was_skipped == (i == 5)
        for scheduler in schedulers:
            scheduler.step()
    first[0][1].load_state_dict(second[0][1].state_dict())  # Running means met the inf.
    assert_same(first, second, device)
    assert [row[:3] for row in first[2].history()] == [row[:3] for row in second[2].history()]
    report = first[2].overflow_report(first[0])
    assert report.step == 5
    assert report == second[2].overflow_report(second[0])


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_graphed_step_clips_by_value_after_the_norm(device, max_norm):
    first, second = make(device), make(device)
    (sample,) = batches(device, 1)
    step = fastamp.cuda.graphed_step(
        first[0], loss_fn, *first[1:], sample, max_norm=max_norm, clip_value=0.003, warmup=1
    )
    for group in batches(device, 4):
        step(*group)
        by_hand(*second, [group], None, max_norm, clip_value=0.003)
    assert_same(first, second, device)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_what_is_changed_between_calls_acts(device):
    first, second = make(device), make(device)
    (sample,) = batches(device, 1)
    step = fastamp.cuda.graphed_step(first[0], loss_fn, *first[1:], sample, dtype=torch.bfloat16)
    for i, group in enumerate(batches(device, 8)):
        for model, optimizer, scaler in (first, second):
            if i == 2:
                optimizer.param_groups[0]["lr"] = 0.5
            elif i == 3:
                optimizer.param_groups[0]["weight_decay"] = 0.3
            elif i == 4:
                scaler.update(64.0) if scaler._scale is not None else None
            elif i == 5:
                scaler.set_growth_interval(1)
            elif i == 6:
                model.eval()
        step(*group)
        by_hand(*second, [group], torch.bfloat16, None)
        assert first[2].get_scale() == second[2].get_scale()
    assert_same(first, second, device)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_disabled_scaler_and_no_autocast(device):
    first, second = make(device, enabled=False), make(device, enabled=False)
    (sample,) = batches(device, 1)
    step = fastamp.cuda.graphed_step(first[0], loss_fn, *first[1:], sample, autocast=False)
    for group in batches(device, 4):
        step(*group)
        second[1].zero_grad()
        loss_fn(second[0](group[0]), group[1]).backward()
        second[1].step()
    assert_same(first, second, device)


def test_the_model_may_take_several_arguments():
    class Two(torch.nn.Linear):
        def forward(self, left, right):
            return super().forward(left + right)

    for inputs in ((torch.ones(2, 3), torch.ones(2, 3)), {"left": torch.ones(2, 3), "right": 1}):
        model = Two(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = fastamp.GradScaler("cpu")
        targets = torch.tensor([0, 2])
        step = fastamp.cuda.graphed_step(model, loss_fn, optimizer, scaler, (inputs, targets))
        before = model.weight.detach().clone()
        assert step(inputs, targets).shape == ()
        assert not torch.equal(before, model.weight)


def test_inputs_that_do_not_fit_are_refused_and_change_nothing():
    model, optimizer, scaler = make("cpu")
    (sample,) = batches("cpu", 1)
    step = fastamp.cuda.graphed_step(model, loss_fn, optimizer, scaler, sample)
    before = [bits(p) for p in model.parameters()]
    for wrong in (
        (sample[0][:2], sample[1]),
        (sample[0].double(), sample[1]),
        (sample[0], 3),
        (sample[0],),
        ([sample[0]], sample[1]),
    ):
        with pytest.raises(ValueError, match=r"graphed_step: expected .* got"):
            step(*wrong)
    twice = fastamp.cuda.graphed_step(model, loss_fn, optimizer, scaler, sample, accumulation=2)
    with pytest.raises(ValueError, match="expected 2 batches, got 1"):
        twice(sample)
    assert [bits(p) for p in model.parameters()] == before


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"scaler": torch.amp.GradScaler("cpu")}, TypeError, "fastamp.GradScaler"),
        ({"sample_inputs": ()}, ValueError, "sample_inputs"),
        ({"sample_inputs": torch.ones(2)}, ValueError, "sample_inputs"),
        ({"accumulation": 0}, ValueError, "accumulation"),
        ({"accumulation": True}, ValueError, "accumulation"),
        ({"max_norm": -1.0}, ValueError, "max_norm"),
        ({"clip_value": -1.0}, ValueError, "clip_value"),
        ({"warmup": 0}, ValueError, "warmup"),
        ({"dtype": torch.float32}, ValueError, "autocast=False"),
        ({"dtype": torch.float16, "autocast": False}, ValueError, "no dtype"),
        ({"max_norm": float("nan")}, ValueError, "max_norm"),
    ],
)
def test_arguments_out_of_range_are_refused(change, error, text):
    model, optimizer, scaler = make("cpu")
    (sample,) = batches("cpu", 1)
    arguments = {"optimizer": optimizer, "scaler": scaler, "sample_inputs": sample, **change}
    with pytest.raises(error, match=f"graphed_step: expected .*{text}"):
        fastamp.cuda.graphed_step(model, loss_fn, **arguments)


@pytest.mark.cuda
def test_capture_needs_an_optimizer_that_skips_on_the_device():
    model, _, scaler = make("cuda")
    optimizer = torch.optim.RMSprop(model.parameters())
    (sample,) = batches("cuda", 1)
    with pytest.raises(TypeError, match=r"graphed_step: expected optimizer .* got RMSprop"):
        fastamp.cuda.graphed_step(model, loss_fn, optimizer, scaler, sample)


@pytest.mark.cuda
def test_a_replay_waits_for_nothing_and_counts_its_edits():
    model, optimizer, scaler = make("cuda")
    (sample,) = batches("cuda", 1)
    step = fastamp.cuda.graphed_step(model, loss_fn, optimizer, scaler, sample)
    versions = [p._version for p in model.parameters()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(*sample)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))


@pytest.mark.cuda
def test_dropout_differs_from_replay_to_replay():
    model, optimizer, scaler = make("cuda", dropout=0.5, lr=0.0)
    (sample,) = batches("cuda", 1)
    step = fastamp.cuda.graphed_step(model, loss_fn, optimizer, scaler, sample)
    assert len({step(*sample).item() for _ in range(5)}) > 1


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("stream", ["that of the capture", "another"])
@pytest.mark.parametrize("current", [0, 1])
def test_a_step_of_a_device_that_is_not_current_replayed_on_any_stream(current, stream):
    there = "cuda:1"
    torchs = make(there)
    own = make(there)
    with torch.cuda.device(current):
        step = fastamp.cuda.graphed_step(own[0], loss_fn, *own[1:], next(batches(there, 1)))
        of_device = torch.cuda.current_stream(there)
        side = of_device if stream == "that of the capture" else torch.cuda.Stream(there)
        losses = []
        for index, batch in enumerate(batches(there, 8)):
            overflows = index == 3
            if overflows:
                batch[0][0] = torch.inf
            with fastamp.autocast("cuda"):
                loss = loss_fn(torchs[0](batch[0]), batch[1])
            torchs[1].zero_grad()
            torchs[2].scale(loss).backward()
            torchs[2].step(torchs[1])
            torchs[2].update()
            side.wait_stream(of_device)
            with torch.cuda.stream(side), torch.cuda.device(current):
                losses.append((step(*batch), loss))
            of_device.wait_stream(side)
            if overflows:  # running means of both are NaN now
                for module in (own[0][1], torchs[0][1]):
                    module.reset_running_stats()
    torch.cuda.synchronize(there)
    for mine, other in losses:
        assert bits(mine) == bits(other.detach())
    for mine, other in zip(own[0].parameters(), torchs[0].parameters(), strict=True):
        assert torch.equal(mine, other)
    assert own[2].state_dict() == torchs[2].state_dict()


@pytest.mark.cuda
def test_inputs_from_the_host_and_of_other_sizes():
    model, optimizer, scaler = make("cuda")
    twin, twins_optimizer, twins_scaler = make("cuda")
    (sample,) = batches("cuda", 1)
    step = fastamp.cuda.graphed_step(model, loss_fn, optimizer, scaler, sample)
    same = fastamp.cuda.graphed_step(twin, loss_fn, twins_optimizer, twins_scaler, sample)
    for x, y in batches("cpu", 4):
        with pytest.raises(ValueError, match=r"expected a tensor of shape \(8, 6\)"):
            step(x[:5], y[:5])  # the last batch of an epoch
        loss = step(x, y)  # copied by the step
        assert bits(loss) == bits(same(x.cuda(), y.cuda()))


def fused_with(scheduler: Any, **options: Any) -> tuple[Any, Any]:
    optimizer = fastamp.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.1)
    return optimizer, scheduler(optimizer, **options)


def test_a_scheduler_of_the_learning_rate_changes_no_constant_and_no_tensor_is_read(monkeypatch):
    def refuse(*_: Any) -> str:
        raise AssertionError("a tensor was read to be printed")

    schedulers = torch.optim.lr_scheduler
    optimizer, scheduler = fused_with(schedulers.StepLR, step_size=1)
    constants = constants_of(optimizer)
    monkeypatch.setattr(torch.Tensor, "__repr__", refuse)
    optimizer.step()
    scheduler.step()
    assert constants_of(optimizer) == constants
    optimizer.param_groups[0]["momentum"] = 0.8
    assert constants_of(optimizer) != constants


def test_written_tensors_count_a_write_each():
    tensors = [torch.ones(2, requires_grad=True), torch.ones(()), torch.nn.Parameter(torch.ones(1))]
    before = [tensor._version for tensor in tensors]
    written = _C.WrittenTensors(tensors)
    written.increment_versions()
    written.increment_versions()
    assert [tensor._version for tensor in tensors] == [version + 2 for version in before]


def test_options_that_are_tensors_are_constants_by_identity_and_version():
    optimizer, _ = fused_with(torch.optim.lr_scheduler.StepLR, step_size=1)
    momentum = optimizer.param_groups[0]["momentum"] = torch.tensor(0.9)
    constants = constants_of(optimizer)
    assert constants_of(optimizer) == constants
    momentum.add_(1e-9)  # Printed alike.
    assert constants_of(optimizer) != constants


def test_warming_up_changes_nothing_though_hooks_clean_the_gradients():
    model, optimizer, scaler = make("cpu", fastamp.optim.AdamW)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: torch.nan_to_num(gradient, 1.0, 1.0, 1.0))
    (sample,) = batches("cpu", 1)
    step = fastamp.cuda.graphed_step(model, loss_fn, optimizer, scaler, sample, max_norm=1.0)
    before = [bits(p) for p in model.parameters()]
    step.warm_up(step.check_batches(sample))
    assert [bits(p) for p in model.parameters()] == before
    assert all(int(state["step"]) == 0 for state in optimizer.state.values())
    assert len(optimizer.state) == len(before)  # They are made.
    assert scaler.history() == []
    assert "_fastamp_pending_amp_step" not in vars(optimizer)
