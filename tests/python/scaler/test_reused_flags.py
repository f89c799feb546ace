# SPDX-License-Identifier: Apache-2.0
"""The flag of an iteration is used again for a later one only if that cannot be observed."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastamp


def ready(grad=1.0):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), grad)
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return scaler, torch.optim.SGD([parameter], lr=1.0), parameter


HOLDS = {
    "mapping": lambda flags: flags,
    "flag": lambda flags: next(iter(flags.values())),
    "alias": lambda flags: next(iter(flags.values())).detach(),
    "array": lambda flags: next(iter(flags.values())).numpy(),
    "memory": lambda flags: next(iter(flags.values())).untyped_storage(),
}


@pytest.mark.parametrize("hold", HOLDS)
def test_a_flag_that_somebody_holds_keeps_its_value(hold):
    scaler, optimizer, parameter = ready(grad=float("inf"))
    scaler.unscale_(optimizer)
    held = HOLDS[hold](scaler._found_inf_per_device(optimizer))
    scaler.update()
    for _ in range(3):
        parameter.grad = torch.ones(2)
        scaler.unscale_(optimizer)
        assert scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item() == 0.0
        scaler.update()
    value = next(iter(held.values())) if hold == "mapping" else held
    if hold == "memory":
        value = torch.tensor([]).set_(value)
    assert float(value) == 1.0


def entry_of(scaler, optimizer):
    """Returns what torch keeps of an optimizer in an iteration."""
    return scaler._per_optimizer_states[id(optimizer)]


def run(scaler, optimizer, parameter, verb, grad):
    """Runs an iteration up to its update, of gradients with one value."""
    parameter.grad = torch.full((2,), grad)
    getattr(scaler, verb)(optimizer)


@pytest.mark.parametrize("verb", ["unscale_", "step"])
def test_an_entry_that_somebody_holds_stays_as_it_was(verb):
    scaler, optimizer, parameter = ready()
    run(scaler, optimizer, parameter, verb, grad=float("inf"))
    held = entry_of(scaler, optimizer)
    stage = held["stage"]
    scaler.update()
    for _ in range(3):
        run(scaler, optimizer, parameter, "unscale_", grad=1.0)
        assert entry_of(scaler, optimizer) is not held
        scaler.update()
    assert held["stage"] is stage
    assert [flag.item() for flag in held["found_inf_per_device"].values()] == [1.0]


def add_key(entry):
    entry["mine"] = 1


def take_stage(entry):
    del entry["stage"]


def add_flag(entry):
    entry["found_inf_per_device"]["mine"] = torch.ones(())


def rename_device(entry):
    flags = entry["found_inf_per_device"]
    flags["mine"] = flags.pop(torch.device("cpu"))


def replace_flags(entry):
    entry["found_inf_per_device"] = {"mine": 1.0}


@pytest.mark.parametrize("verb", ["unscale_", "step"])
@pytest.mark.parametrize(
    "change",
    [add_key, take_stage, add_flag, rename_device, replace_flags],
    ids=lambda f: f.__name__,
)
def test_what_users_write_into_an_entry_is_gone_with_its_iteration(change, verb):
    scaler, optimizer, parameter = ready()
    for _ in range(2):
        run(scaler, optimizer, parameter, verb, grad=1.0)
        change(entry_of(scaler, optimizer))
        scaler._per_optimizer_states.clear()
        run(scaler, optimizer, parameter, verb, grad=1.0)
        entry = entry_of(scaler, optimizer)
        assert set(entry) == {"stage", "found_inf_per_device"}
        assert list(entry["found_inf_per_device"]) == [torch.device("cpu")]
        scaler.update()


@pytest.mark.parametrize("bad", ["110", "101", "010"])
def test_flags_of_iterations_in_a_row_are_their_own(bad):
    scaler, optimizer, parameter = ready()
    for expected in bad:
        parameter.grad = torch.full((2,), float("inf") if expected == "1" else 1.0)
        scaler.unscale_(optimizer)
        flag = scaler._found_inf_per_device(optimizer)[torch.device("cpu")]
        assert flag.item() == float(expected)
        del flag
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped == (expected == "1")


def test_a_flag_made_in_inference_mode_is_not_used_outside():
    scaler, optimizer, _ = ready()
    with torch.inference_mode():
        scaler.unscale_(optimizer)
        scaler.update()
    scaler.unscale_(optimizer)
    assert not scaler._found_inf_per_device(optimizer)[torch.device("cpu")].is_inference()


class CalledOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, fastamp.optim.SGD], ids=["torchs", "takes_amp_step"]
)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_no_operator_is_spent_on_zeroing_a_flag(kind, clips, overflow):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([parameter], lr=1.0)
    scaler = fastamp.GradScaler("cpu")
    for _ in range(3):  # The first one makes counters and history, which start at zero.
        scaler.scale(torch.ones(()))
        parameter.grad = torch.full((2,), float("inf") if overflow else 1.0)
        # As on a CUDA device, whose flags the host cannot write: each operator is a launch.
        with CalledOps() as called:
            if clips:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.step_was_skipped == overflow
    passes = {"unscale_and_check_", "norm_and_check_"} & set(called.names)
    assert passes
    assert not {"zeros", "zeros_like", "zero_", "full", "new_zeros"} & set(called.names)


def test_a_flag_that_a_subclass_raises_before_the_gradients_are_seen_stays():
    class Scaler(fastamp.GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            found_inf.fill_(1.0)
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    scaler = Scaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD([parameter], lr=1.0))
    assert torch.equal(parameter, torch.ones(2))
