# SPDX-License-Identifier: Apache-2.0
"""Training with weight copies: the bits of training without, and no weight is cast."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch

import fastamp
from support.amp_reference import DEVICES
from support.casts import copies_made
from support.copy_runs import OPTIMIZERS, Training, assert_same_run
from support.kept_casts import casts_of, use
from support.small_models import MODELS

pytestmark = pytest.mark.usefixtures("nothing_is_kept_afterwards")
BF16 = torch.bfloat16
DTYPES = {"bf16": BF16, "fp16": torch.float16}
devices = pytest.mark.parametrize("device", DEVICES)


@devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_models_train_to_the_same_bits_without_casting_a_weight(name, dtype, device):
    def train(autocast_dtype):
        return Training(name, "AdamW", DTYPES[dtype], autocast_dtype, device)

    def run(autocast_dtype):
        return train(autocast_dtype).steps(5)

    try:
        torchs = run(None)
    except RuntimeError as error:
        if name != "lstm" or "primitive" not in str(error):
            raise
        pytest.skip("oneDNN has no low-precision LSTM on this CPU")
    own = run(DTYPES[dtype])
    assert_same_run(own, torchs)
    # The first step asks for the weights, the second region's casts become their weight copies.
    # (Recomputation finds them already.)
    assert own.weight_casts[0] == torchs.weight_casts[-1] >= own.weight_casts[1] > 0
    always = casts_into_buffers(train(None).model) if device == "cuda" else 0
    assert own.weight_casts[2:] == [always] * 3


def casts_into_buffers(model):
    """cuDNN takes a recurrent layer's weights in a buffer of its own, new in each region."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    return sum(len(list(layer.parameters())) for layer in layers)


@devices
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("overflow", [(), (0, 1), (2, 3, 5)])
def test_optimizers_skipped_steps_and_accumulation(optimizer, overflow, device):
    def run(autocast_dtype):
        training = Training("cnn", optimizer, torch.float16, autocast_dtype, device)
        return training.steps(7, overflow, micro_steps=2)

    own, torchs = run(torch.float16), run(None)
    assert_same_run(own, torchs)
    assert not any(own.weight_casts[2:])


def test_the_step_casts_nothing_either():
    training = Training("separate qkv", "AdamW", BF16, BF16)
    training.steps(3)
    training.forward().backward()
    assert copies_made(training.optimizer.step) == 0
    assert training.optimizer._fastamp_weight_copies is not None


def test_another_dtype_than_the_regions_has_no_weight_copy_and_is_right():
    own = Training("mlp", "AdamW", BF16, torch.float16).steps(4)
    torchs = Training("mlp", "AdamW", BF16, None).steps(4)
    assert_same_run(own, torchs)
    assert own.weight_casts == torchs.weight_casts


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_is_the_same_and_resumes(optimizer):
    whole = Training("mlp", optimizer, BF16, BF16)
    whole.steps(3)
    plain = Training("mlp", optimizer, BF16, None)
    plain.steps(3)
    saved = copy.deepcopy(whole.optimizer.state_dict())
    assert str(saved) == str(plain.optimizer.state_dict())
    resumed = Training("mlp", optimizer, BF16, BF16)
    resumed.steps(2)
    weights = {k: v.clone() for k, v in whole.model.state_dict().items()}
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(saved)
    resumed.scaler.load_state_dict(whole.scaler.state_dict())
    for training in (whole, resumed):
        training.run.seen.clear()
        training.steps(3)
    assert_same_run(resumed.run, whole.run)
    torch_class = type(whole.optimizer)._torch_class
    torch_class([p.detach() for p in whole.model.parameters()], lr=1.0).load_state_dict(saved)


def edited_run(autocast_dtype, edit):
    """A run whose weights somebody edits after each step."""
    training = Training("separate qkv", "momentum", BF16, autocast_dtype)
    for step in range(6):
        training.step(overflows=step == 3)
        edit(training, step)
    return training.finish()


def load_old_weights(training, step):
    if step == 1:
        training.old = {k: v.clone() for k, v in training.model.state_dict().items()}
    if step == 4:
        training.model.load_state_dict(training.old)


def swap_averages(training, step):
    params = list(training.model.parameters())
    if step == 0:
        training.average = [p.detach().clone() for p in params]
    with torch.no_grad():
        for average, p in zip(training.average, params, strict=True):
            average.lerp_(p, 0.5)
        live = [p.clone() for p in params]
        torch._foreach_copy_(params, training.average)
        training.forward()
        torch._foreach_copy_(params, live)


def clamp(training, _):
    with torch.no_grad():
        for p in training.model.parameters():
            p.clamp_(-0.3, 0.3)


def assign_data(training, _):
    for p in training.model.parameters():
        p.data = p.data * 0.9


def step_by_torch(training, step, **options):
    if step % 2:
        other = torch.optim.SGD(training.model.parameters(), lr=0.1, **options)
        training.forward().backward()
        other.step()
        training.optimizer.zero_grad()


def step_by_torchs_fused(training, step):
    step_by_torch(training, step, fused=True)


def step_by_another_of_fastamp(training, _):
    other = fastamp.optim.SGD(training.model.parameters(), lr=0.1, autocast_dtype=BF16)
    for _ in range(2):
        training.forward().backward()
        other.step()
        training.optimizer.zero_grad()


@pytest.mark.parametrize(
    "edit",
    [
        load_old_weights,
        swap_averages,
        clamp,
        assign_data,
        step_by_torch,
        step_by_torchs_fused,
        step_by_another_of_fastamp,
    ],
)
def test_weights_that_others_write_are_seen(edit):
    assert_same_run(edited_run(BF16, edit), edited_run(None, edit))


def test_two_optimizers_share_weight_copies_and_the_first_to_go_leaves_them():
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))
    first, second = (fastamp.optim.SGD([weight], lr=0.5, autocast_dtype=BF16) for _ in range(2))
    for _ in range(4):
        for optimizer in (first, second):
            use(weight).sum().backward()
            optimizer.step()
    assert casts_of(lambda: use(weight)) == (0, 1)
    assert fastamp.casts.kept() == (1, 12)
    del first, optimizer
    gc.collect()
    assert casts_of(lambda: use(weight)) == (0, 1)
    del second
    gc.collect()
    assert fastamp.casts.kept() == (0, 0)


def stepped(weight, optimizer):
    """Steps until the weight has a weight copy."""
    for _ in range(2):
        use(weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert casts_of(lambda: use(weight)) == (0, 1)


def test_the_documented_danger_ends_with_the_next_step():
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))
    optimizer = fastamp.optim.SGD([weight], lr=0.5, autocast_dtype=BF16)
    stepped(weight, optimizer)
    before = use(weight)
    weight.data.fill_(8.0)
    assert torch.equal(use(weight), before)  # the danger
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.eq(7.5).all()  # the edit has won
    assert casts_of(lambda: use(weight)) == (0, 1)
    assert use(weight).eq(22.5).all()
    weight.data.fill_(1.0)
    fastamp.casts.drop(weight)  # the way out
    assert use(weight).eq(3.0).all()
    optimizer.step()
    assert use(weight).eq(1.5).all()


def test_a_graph_that_outlives_the_step_has_the_old_weights_as_with_torch():
    gradients = []
    for autocast_dtype in (BF16, None):
        weight = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))
        optimizer = fastamp.optim.SGD([weight], lr=0.5, autocast_dtype=autocast_dtype)
        for _ in range(2):
            use(weight).sum().backward()
            optimizer.step()
        x = torch.ones(1, 3, requires_grad=True)
        with fastamp.autocast("cpu"):
            late = torch.mm(x, weight)
        use(weight).sum().backward()
        optimizer.step()
        assert torch.equal(use(weight), weight.detach().to(BF16).sum(0, keepdim=True))
        late.sum().backward()
        gradients.append((x.grad, weight.grad, weight.detach()))
    for own, torchs in zip(*gradients, strict=True):
        assert torch.equal(own, torchs)


def test_a_step_inside_the_region():
    def run(autocast_dtype):
        weight = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))
        optimizer = fastamp.optim.SGD([weight], lr=0.5, autocast_dtype=autocast_dtype)
        outs = []
        with fastamp.autocast("cpu"):
            for _ in range(4):
                outs.append(torch.mm(torch.ones(1, 3, dtype=BF16), weight))
                outs[-1].sum().backward()
                optimizer.step()
        return [*outs, weight]

    assert all(torch.equal(a, b) for a, b in zip(run(BF16), run(None), strict=True))


def test_threads_that_read_while_another_steps():
    weight = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = fastamp.optim.SGD([weight], lr=2.0**-10, autocast_dtype=BF16)
    stop, wrong = threading.Event(), []

    def read():
        while not stop.is_set():
            x = torch.ones(1, 64, requires_grad=True)
            with fastamp.autocast("cpu"):
                out = torch.mm(x, weight)
            try:
                torch.autograd.grad(out.sum(), x)
            except RuntimeError as error:
                wrong.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.equal(use(weight), weight.detach().to(BF16).sum(0, keepdim=True))


def test_models_trained_in_threads_are_as_trained_alone():
    alone = Training("mlp", "AdamW", BF16, None).steps(20)
    trainings = [Training("mlp", "AdamW", BF16, BF16) for _ in range(3)]
    threads = [threading.Thread(target=training.steps, args=(20,)) for training in trainings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for training in trainings:
        assert_same_run(training.run, alone)
    # The frames of ended threads hold what they ran.
    del trainings, training, threads, thread
