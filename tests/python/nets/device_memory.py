# SPDX-License-Identifier: Apache-2.0
"""Every allocation of device memory fails in turn: an error, nothing changed, the next call right.

    python tools/simulated_cuda.py -- python -m nets.device_memory [subject ...]

Runs on the simulated CUDA device, with torch's caching allocator turned off, so that each tensor is
an allocation. tests/cpp/faults is the same for host memory.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import math
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

import fastamp
from nets.files import same
from support.simulated_cuda import allocations_fail, count

#: Makes a subject: a call, and what can be seen of it.
Make = Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]


def numbers(*shape: int, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = (torch.arange(math.prod(shape)) * 0.37).sin().mul(factor).reshape(shape)
    return values.to("cuda", dtype)


def seen(value: Any) -> Any:
    """A copy on the host; tensors of zeros, and what holds only such, count as missing."""
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().clone()
        return host if host.ne(0).any() else None
    if isinstance(value, dict):
        found = {key: seen(entry) for key, entry in value.items()}
        return {
            key: entry
            for key, entry in found.items()
            if isinstance(entry, torch.Tensor) or entry not in (None, {}, 0)
        }
    if isinstance(value, (list, tuple)):
        return [seen(entry) for entry in value]
    return value


def stepped(param: torch.Tensor, state: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a parameter's state without what a first step makes before it steps."""
    master = state.get("master_param")
    made = set() if master is None or not torch.equal(master, param.float()) else {"master_param"}
    if "step" in state and state["step"].item() == 0:
        made |= state.keys() - {"master_param"}
    return {key: entry for key, entry in state.items() if key not in made}


class Training:
    """Parameters of two dtypes with scaled gradients, an optimizer, and a scaler with its scale."""

    def __init__(self, optimizer: Callable[[list[Any]], Any], *, half: bool = True) -> None:
        second = torch.bfloat16 if half else torch.float32
        shapes = [((64, 64), torch.float32), ((4, 3), second), ((8, 2), torch.float32)]
        self.params = [torch.nn.Parameter(numbers(*s, dtype=d)) for s, d in shapes]
        self.optimizer = optimizer(self.params)
        self.scaler = fastamp.GradScaler("cuda", init_scale=1024.0, history_size=3)
        self.scaler.scale(torch.ones((), device="cuda"))
        self.guard: Any = None
        self.fill()

    def fill(self) -> None:
        for param in self.params:
            param.grad = numbers(*param.shape, factor=100.0, dtype=param.dtype)

    def look(self) -> Any:
        states = {
            number: stepped(param, self.optimizer.state[param])
            for number, param in enumerate(self.params)
            if param in self.optimizer.state
        }
        per_optimizer = [
            str(entry["stage"]) for entry in self.scaler._per_optimizer_states.values()
        ]
        return seen(
            [
                self.params,
                [param.grad for param in self.params],
                states,
                self.scaler.state_dict()["scale"],
                [stage for stage in per_optimizer if "READY" not in stage],
            ]
        )


def training(
    optimizer: Callable[[list[Any]], Any],
    call: Callable[[Training], Any],
    first: Callable[[Training], Any] = lambda _: None,
    **options: Any,
) -> Make:
    """Makes subjects of a call in training; `first` is called beforehand."""

    def make() -> Any:
        subject = Training(optimizer, **options)
        first(subject)
        return lambda: call(subject), subject.look

    return make


def step(subject: Training) -> None:
    subject.scaler.step(subject.optimizer)


def step_once(subject: Training) -> None:
    step(subject)
    subject.scaler.update()
    subject.fill()


def unscale(subject: Training) -> None:
    subject.scaler.unscale_(subject.optimizer)


def clip(subject: Training) -> None:
    subject.scaler.clip_grad_norm_(subject.optimizer, 0.1)


def update(subject: Training) -> None:
    subject.scaler.update()


def load(subject: Training) -> None:
    other = Training(lambda p: fastamp.optim.AdamW(p, lr=0.1))
    step_once(other)
    subject.optimizer.load_state_dict(other.optimizer.state_dict())


def guard(subject: Training) -> None:
    subject.guard = fastamp.StepGuard(subject.optimizer)


def overflow(subject: Training) -> None:
    subject.params[0].grad[0, 1] = math.inf


def overflow_later(subject: Training) -> None:
    step_once(subject)
    overflow(subject)


def guard_of_spikes(subject: Training) -> None:
    subject.guard = fastamp.StepGuard(subject.optimizer, skip="spike", history_size=3)
    plain_step(subject)
    subject.fill()


def plain_step(subject: Training) -> None:
    subject.optimizer.step()


def region() -> Any:
    weight, x = torch.nn.Parameter(numbers(16, 16)), numbers(16, 16)
    results: list[Any] = []

    def call() -> None:
        with fastamp.autocast("cuda", dtype=torch.bfloat16):
            first = torch.mm(x, weight)
            results[:] = [first, torch.mm(first, weight).softmax(1)]

    return call, lambda: seen([weight, list(results)])


def kept_casts() -> Any:
    layer, x = torch.nn.Linear(16, 16, device="cuda"), numbers(16, 16)
    layer.load_state_dict({"weight": numbers(16, 16), "bias": numbers(16)})
    results: list[Any] = []

    def call() -> None:
        with fastamp.casts.keep(layer):
            made = []
            for _ in range(2):
                with fastamp.autocast("cuda", dtype=torch.bfloat16):
                    made.append(layer(x))
        results[:] = made

    return call, lambda: seen([list(layer.parameters()), list(results)])


OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
    "sgd": lambda p: fastamp.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: fastamp.optim.Adam(p, lr=0.1, amsgrad=True, master="remainder"),
    "adamw": lambda p: fastamp.optim.AdamW(p, lr=0.1),
    "adamw_16": lambda p: fastamp.optim.AdamW(p, lr=0.1, state_dtype=torch.bfloat16),
    "adamw_8": lambda p: fastamp.optim.AdamW(p, lr=0.1, state_dtype="8bit"),
}
muon = lambda p: fastamp.optim.Muon(p, lr=0.1)  # noqa: E731
torchs = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731

SUBJECTS: dict[str, Make] = {
    "region": region,
    "kept casts": kept_casts,
    "unscale_": training(torchs, unscale),
    "clip": training(OPTIMIZERS["adamw"], clip),
    "update": training(OPTIMIZERS["sgd"], update, step),
    "guarded step": training(OPTIMIZERS["adamw"], plain_step, guard),
    "guarded step, spikes": training(OPTIMIZERS["sgd"], plain_step, guard_of_spikes),
    "guarded step of torch's optimizer": training(torchs, plain_step, guard),
    "load": training(OPTIMIZERS["adamw"], load),
    **{f"first step of {name}": training(make, step) for name, make in OPTIMIZERS.items()},
    **{f"step of {name}": training(make, step, step_once) for name, make in OPTIMIZERS.items()},
    "step after a clip": training(OPTIMIZERS["adamw"], step, clip),
    "skipped step": training(OPTIMIZERS["adamw_16"], step, overflow_later),
    "first step of muon": training(muon, step),
    "step of muon": training(muon, step, step_once),
}


def fails_in_products(error: BaseException) -> bool:
    """Whether it was raised by Muon's step itself: torch's products, after the momentum."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    in_step = frame.f_code.co_name == "_fastamp_step_now"
    return in_step and isinstance(frame.f_locals["self"], fastamp.optim.Muon)


def fail_every_allocation(make: Make) -> int:
    """Runs a call with each of its allocations failing, and all after it; returns how many.

    Raises:
        AssertionError: Something was changed by a call that failed, or the next one did not do
            what it does where nothing fails.
    """
    for _ in range(2):  # What is made once in a process.
        call, look = make()
        call()
    after = look()
    failing = 0
    while True:
        failing += 1
        call, look = make()
        before = look()
        torch.cuda.synchronize()
        made = count("cudaMalloc")
        try:
            with allocations_fail(failing):
                call()
        except RuntimeError as error:
            if fails_in_products(error):
                continue
            assert same(before, look()), f"changed by a call without its allocation {failing}"
            call()
        else:
            if count("cudaMalloc") - made < failing:
                return failing - 1
        assert same(after, look()), f"differs after a call without its allocation {failing}"


def main() -> None:
    """Prints how many allocations each subject has; ends with an error if one was mishandled."""
    failed = 0
    for name in sys.argv[1:] or SUBJECTS:
        try:
            print(f"{name}: {fail_every_allocation(SUBJECTS[name])}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"{name}: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
