# SPDX-License-Identifier: Apache-2.0
"""A program that imports fastamp, and uses its parts for the first time, inside modes of torch.

Each mode has two processes of its own, forked from one that has imported torch: one imports fastamp
in the mode, the other was forked after the import and uses everything in the mode, part by part.
Afterwards, outside the mode, each trains a little. Prints as JSON, by mode, which uses raised what,
and what the training gave.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it, which would cost each process a second
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Use = Callable[[], Any]
BF16 = torch.bfloat16

warnings.simplefilter("ignore")


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Holding(torch.autograd.Function):
    """Runs a use within a backward pass."""

    use: Use

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        Holding.use()
        return grads


def within(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[Use], None]:
    def run(use: Use) -> None:
        with context():
            use()

    return run


def with_default_dtype(use: Use) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        use()
    finally:
        torch.set_default_dtype(torch.float32)


def with_set_device(use: Use) -> None:
    torch.set_default_device("meta")
    try:
        use()
    finally:
        torch.set_default_device(None)


def deterministically(use: Use) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        use()
    finally:
        torch.use_deterministic_algorithms(False)


def called(wrap: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> Callable[[Use], None]:
    """Runs the use inside a function that a transform calls with a tensor of its own."""

    def run(use: Use) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            use()
            return x.sum()

        wrap(function)

    return run


def in_backward(use: Use) -> None:
    Holding.use = staticmethod(use)
    Holding.apply(torch.ones(2, requires_grad=True)).sum().backward()


def in_a_thread(use: Use) -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            use()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def ones() -> torch.Tensor:
    return torch.ones(2, 2)


MODES: dict[str, Callable[[Use], None]] = {
    "none": lambda use: use(),
    "inference_mode": within(torch.inference_mode),
    "no_grad": within(torch.no_grad),
    "default dtype": with_default_dtype,
    "default device": with_set_device,
    "device context": within(lambda: torch.device("meta")),
    "dispatch mode": within(Dispatch),
    "fake tensors": within(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "function mode": within(Function),
    "vmap": called(lambda function: torch.vmap(function)(ones())),
    "grad": called(lambda function: torch.func.grad(function)(ones())),
    "jvp": called(lambda function: torch.func.jvp(function, (ones(),), (ones(),))),
    "functionalize": called(lambda function: torch.func.functionalize(function)(ones())),
    "make_fx": called(lambda function: make_fx(function)(ones())),
    "jit.trace": called(lambda function: torch.jit.trace(function, (ones(),), check_trace=False)),
    "torch's region": within(lambda: torch.autocast("cpu", dtype=BF16)),
    "a disabled region": within(lambda: torch.autocast("cpu", enabled=False)),
    "a region without cache": within(lambda: torch.autocast("cpu", cache_enabled=False)),
    "profiler": within(lambda: torch.autograd.profiler.profile(use_kineto=False)),
    "anomaly mode": within(torch.autograd.detect_anomaly),
    "saved tensor hooks": within(
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)
    ),
    "deterministic": deterministically,
    "backward": in_backward,
    "thread": in_a_thread,
}


class Job:
    """A small model, made before the mode is entered, and what trains it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)
        )
        self.batch = torch.arange(8.0).view(2, 4) / 8
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def loss(self) -> torch.Tensor:
        return self.model(self.batch).float().square().mean()

    def backward(self) -> None:
        with sys.modules["fastamp"].autocast("cpu", dtype=BF16):
            loss = self.loss()
        loss.backward()

    def step(self, scaler: Any) -> None:
        fastamp = sys.modules["fastamp"]
        self.optimizer.zero_grad()
        with fastamp.autocast("cpu", dtype=BF16):
            loss = self.loss() + self.loss()  # the second finds casts
        with torch.autocast("cpu", dtype=BF16):
            loss = loss + self.loss() + self.loss()
        names_of_graph(loss)
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        fastamp.clip_grad_norm_(self.model.parameters(), 1.0)
        scaler.step(self.optimizer)
        scaler.update()


def names_of_graph(loss: torch.Tensor) -> list[str]:
    """Python's view of the graph, which must work with the nodes of our casts."""
    names, nodes = [], [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.append(node.name() + type(node).__name__)
            nodes += [following for following, _ in node.next_functions]
    return names


def train(job: Job) -> str:
    """Trains in no mode, with a scaler of its own, and returns a hash of all that came of it."""
    fastamp = sys.modules["fastamp"]
    job.optimizer = fastamp.optim.AdamW(job.model.parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for _ in range(2):
        job.step(scaler)
    with fastamp.autocast("cpu", dtype=BF16):
        names = names_of_graph(job.loss())
    results = [*job.model.parameters(), *(p.grad for p in job.model.parameters())]
    assert not any(result.is_inference() for result in results)
    digest = hashlib.sha256(repr((names, scaler.state_dict())).encode())
    for result in results:
        digest.update(result.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def use_region(_job: Job) -> None:
    with sys.modules["fastamp"].autocast("cpu"):
        pass


def use_cast(job: Job) -> None:
    with sys.modules["fastamp"].autocast("cpu", dtype=BF16):
        job.loss()
        job.loss()


def use_torchs_region(job: Job) -> None:
    with torch.autocast("cpu", dtype=BF16):
        job.loss()
        job.loss()


def use_backward(job: Job) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        job.backward()


def use_scaler(job: Job) -> None:
    fastamp = sys.modules["fastamp"]
    for parameter in job.model.parameters():
        parameter.grad = torch.zeros_like(parameter, device="cpu")
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones((), device="cpu"))
    scaler.unscale_(job.optimizer)
    scaler.step(job.optimizer)
    scaler.update()


def use_optimizer(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.grad = torch.zeros_like(parameter, device="cpu")
    optimizer = sys.modules["fastamp"].optim.SGD(job.model.parameters(), lr=0.0, momentum=0.9)
    optimizer.step()
    sys.modules["fastamp"].clip_grad_norm_(job.model.parameters(), 1.0)


def use_fuse(job: Job) -> None:
    sys.modules["fastamp"].optim.fuse_(job.optimizer, autocast_dtype=BF16)


def use_kept_casts(job: Job) -> None:
    fastamp = sys.modules["fastamp"]
    fastamp.casts.keep(job.model)
    fastamp.casts.together(job.model)
    use_cast(job)
    use_cast(job)


def use_trace(job: Job) -> None:
    with sys.modules["fastamp"].debug.trace() as trace:
        use_cast(job)
    str(trace)


def use_policies(job: Job) -> None:
    fastamp = sys.modules["fastamp"]
    fastamp.policies.table()
    with fastamp.policies.override({"mm": "fp32"}):
        use_cast(job)
    fastamp.policies.set("linear", "fp32")
    use_cast(job)
    fastamp.policies.reset()


def use_graphed_step(job: Job) -> None:
    fastamp = sys.modules["fastamp"]
    fastamp.cuda.graphed_step(
        job.model, torch.nn.functional.mse_loss, job.optimizer,
        fastamp.GradScaler("cpu"), (job.batch, job.batch), dtype=BF16,
    )  # fmt: skip


def use_install(job: Job) -> None:
    fastamp = sys.modules["fastamp"]
    importlib.import_module("fastamp.torch")
    with fastamp.install():
        use_torchs_region(job)
        torch.amp.GradScaler("cpu")


USES: dict[str, Callable[[Job], None]] = {
    name.removeprefix("use_"): use for name, use in globals().items() if name.startswith("use_")
}


def import_it(_job: Job) -> None:
    import fastamp  # noqa: F401


def outcome(mode: str, uses: dict[str, Callable[[Job], None]]) -> dict[str, Any]:
    """Runs each of the uses in a mode, and then trains outside it."""
    raised = {}
    for name, use in uses.items():
        try:
            MODES[mode](functools.partial(use, Job()))
        except Exception as error:
            raised[name] = f"{type(error).__name__}: {error}"
    try:
        trained = train(Job())
    except Exception as error:
        trained = f"{type(error).__name__}: {error}"
    return {"raised": raised, "trained": trained}


def in_a_fork(function: Callable[[], Any]) -> Any:
    """Returns what the function does in a forked process, or how that process ended."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        # A pool made before the fork has no threads. torch makes another for the first thread that
        # asks, and a second that asks meanwhile finds none.
        torch.set_num_threads(1)
        with os.fdopen(writing, "w") as pipe:
            json.dump(function(), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return json.loads(text) if status == 0 else {"raised": {}, "trained": f"exit status {status}"}


def in_every_mode(uses: dict[str, Callable[[Job], None]]) -> dict[str, Any]:
    return {mode: in_a_fork(functools.partial(outcome, mode, uses)) for mode in MODES}


if __name__ == "__main__":
    imported = in_every_mode({"import": import_it})
    import_it(Job())
    print(json.dumps({"import": imported, "use": in_every_mode(USES)}))
