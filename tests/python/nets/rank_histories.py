# SPDX-License-Identifier: Apache-2.0
"""Training histories on simulated ranks that differ from rank to rank, and what must not differ."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fastamp
import fastamp.optim
from support.scale_model import ScaleModel
from support.simulated_ranks import NobodyComesError, Outcome, run_on_ranks

#: What the ranks hold. "group": each a model of its own, as stages of a pipeline do; "stages": two
#: of these, each sharded over half of the ranks; "tp+plain": the last layer has plain parameters.
KINDS = ("group", "ddp", "fsdp", "hsdp", "tp", "tp+plain", "fsdp+tp", "stages")
_PLAIN = ("group", "ddp")
_TENSOR_PARALLEL = ("tp", "tp+plain", "fsdp+tp")
#: Kinds whose ranks have different models, and so need a group to agree over.
_APART = ("group", "stages")
_OPTIMIZERS = {
    "fastamp SGD": lambda p: fastamp.optim.SGD(p, lr=0.125, momentum=0.5),
    "fastamp AdamW": lambda p: fastamp.optim.AdamW(p, lr=0.125),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.125),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.125),
}
_PARAMETERS = 6  # Of the model: weight and bias of three layers.


@dataclass(frozen=True)
class Iteration:
    """What happens until an ``update``; ranks and parameters by number, values as Python's."""

    micro: tuple[int, ...] = (1,)
    """Backward passes on each rank; the last number is that of all ranks behind it."""
    losses: tuple[tuple[int, float], ...] = ()
    """(rank, factor of its last loss)."""
    gradients: tuple[tuple[int, int, float], ...] = ()
    """(rank, parameter, value that one element gets after backward)."""
    missing: tuple[tuple[int, int], ...] = ()
    """(rank, parameter) without a gradient."""
    unscale: bool = False
    clip: str = ""
    """"", "norm", "value", "torch", "fastamp", "mesh" or "error"."""
    not_clipping: tuple[int, ...] = ()
    """Ranks that leave the clip out; of kind "group" only."""
    raises: int | None = None
    """Rank whose program ends after its backward pass."""


@dataclass(frozen=True)
class History:
    """A program for some ranks."""

    kind: str
    ranks: int
    optimizers: tuple[str, ...]
    iterations: tuple[Iteration, ...]
    group: bool = True
    """Whether the scaler agrees over all ranks."""
    rules: tuple[tuple[str, int], ...] = ()
    """Options of the scaler."""
    order: int = 0
    """Seed of the order in which ranks arrive."""
    guard: bool = False
    """``fastamp.StepGuard`` instead of a scaler."""


def _some(draw: random.Random, count: int, most: int) -> list[int]:
    return draw.sample(range(count), draw.randint(0, min(count, most)))


def _draw_iteration(draw: random.Random, kind: str, ranks: int, optimizers: int) -> Iteration:
    bad = draw.random() < 0.5
    value = draw.choice((math.inf, -math.inf, math.nan))
    clips = ["", "", "norm", "norm", "error"]
    if kind != "tp+plain":  # torch's functions refuse DTensors among plain tensors.
        clips += ["value", "torch", "fastamp"]
    if kind in _APART:
        clips += ["mesh", "mesh"]
    gradients: tuple[tuple[int, int, float], ...] = ()
    losses: tuple[tuple[int, float], ...] = ()
    if bad and kind not in _TENSOR_PARALLEL and draw.random() < 0.5:
        losses = tuple((rank, value) for rank in _some(draw, ranks, 3))
    elif bad:
        gradients = tuple(
            (rank, draw.randrange(4 if kind == "tp+plain" else _PARAMETERS), value)
            for rank in _some(draw, ranks, 3)
        )
    missing: tuple[tuple[int, int], ...] = ()
    if draw.random() < 0.4:
        without = draw.sample(range(_PARAMETERS), draw.randint(1, _PARAMETERS - 1))
        # Replicas that were averaged have the same gradients, or none.
        where = range(ranks) if kind == "ddp" or draw.random() < 0.3 else _some(draw, ranks, 4)
        # No optimizer is without gradients on all ranks, where torch's step would raise.
        missing = tuple(
            (rank, number)
            for rank in where
            for number in without
            if number >= optimizers or (kind != "ddp" and rank > 0)
        )
    clip = draw.choice(clips)
    if clip in ("torch", "fastamp") and kind not in _PLAIN:
        # torch's norm over a mesh needs the same gradients on all of its ranks.
        missing = tuple((rank, n) for n in {n for _, n in missing} for rank in range(ranks))
        missing = tuple(entry for entry in missing if entry[1] >= optimizers)
    return Iteration(
        micro=tuple(draw.randint(1, 3) for _ in range(min(ranks, 4)))
        if kind in _PLAIN
        else (draw.randint(1, 2),),
        losses=losses,
        gradients=gradients,
        missing=missing,
        unscale=draw.random() < 0.3,
        clip=clip,
        not_clipping=tuple(_some(draw, ranks, 3))
        if kind == "group" and clip in ("norm", "value") and draw.random() < 0.3
        else (),
        raises=draw.randrange(ranks) if draw.random() < 0.05 else None,
    )


def draw_history(seed: int) -> History:
    """The history of a number."""
    draw = random.Random(seed)
    kind = draw.choice(KINDS + _PLAIN * 2)
    # Ranks with DTensors take a hundred times as long, 16 of them half a second.
    sizes = (2, 3, 4, 5, 8, 16, 33, 64) if kind in _PLAIN else (2, 3, 4, 8)
    if draw.random() < 0.02:
        sizes = (16, 64)
    if kind in ("hsdp", "fsdp+tp", "stages"):
        sizes = tuple(size for size in sizes if size % 2 == 0)
    if kind in _TENSOR_PARALLEL:
        sizes = tuple(size for size in sizes if size in (2, 4, 8)) or (8,)
    ranks = draw.choice(sizes)
    rules: dict[str, int] = {"growth_interval": draw.choice((1, 2, 5))}
    if draw.random() < 0.3:
        rules["hysteresis"] = 2
    if draw.random() < 0.3:
        rules["fast_growth_interval"] = 1
    # torch's optimizers refuse DTensors among plain tensors.
    names = [name for name in _OPTIMIZERS if kind != "tp+plain" or "fastamp" in name]
    optimizers = tuple(draw.choices(names, k=draw.randint(1, 3)))
    iterations = [
        _draw_iteration(draw, kind, ranks, len(optimizers)) for _ in range(draw.randint(1, 4))
    ]
    return History(
        kind=kind,
        ranks=ranks,
        optimizers=optimizers,
        iterations=tuple(iterations),
        group=kind in _PLAIN or kind in _APART or draw.random() < 0.3,
        rules=tuple(sorted(rules.items())),
        order=draw.randrange(1 << 30),
        guard=draw.random() < 0.1,
    )


# The program of one rank.


class _Guards:
    """Guards of optimizers, called as a scaler is."""

    def __init__(self, optimizers: list[Any], group: Any) -> None:
        make: Any = fastamp.StepGuard
        self._guards = {id(o): make(o, group=group) for o in optimizers}

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def unscale_(self, optimizer: Any) -> None:
        pass

    def clip_grad_norm_(self, optimizer: Any, max_norm: float, **options: Any) -> None:
        self._guards[id(optimizer)].clip_grad_norm_(max_norm, **options)

    def clip_grad_value_(self, optimizer: Any, clip_value: float) -> None:
        self._guards[id(optimizer)].clip_grad_value_(clip_value)

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def step_was_skipped_for(self, optimizer: Any) -> bool:
        skipped: bool = self._guards[id(optimizer)].step_was_skipped
        return skipped

    def update(self) -> None:
        pass

    def get_scale(self) -> float:
        return 1.0


class _Program:
    def __init__(self, history: History, rank: int) -> None:
        self.history, self.rank = history, rank
        self.shards: Any = None  # What mesh= of a clip gets.
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        )
        self.model = self._spread(model)
        parameters = list(self.model.parameters())
        assert len(parameters) == _PARAMETERS
        self.parameters = parameters
        # Neighbors go to different optimizers.
        count = len(history.optimizers)
        self.owned = [parameters[number::count] for number in range(count)]
        self.optimizers = [
            _OPTIMIZERS[name](owned)
            for name, owned in zip(history.optimizers, self.owned, strict=True)
        ]
        group = dist.group.WORLD if history.group else None
        self.scaler: Any = (
            _Guards(self.optimizers, group)
            if history.guard
            else fastamp.GradScaler(
                "cpu", init_scale=8.0, process_group=group, **dict(history.rules)
            )
        )

    def _spread(self, model: Any) -> Any:
        kind, ranks = self.history.kind, self.history.ranks
        self.shards = {dist.group.WORLD: None}
        if kind == "ddp":
            return DistributedDataParallel(model)
        if kind == "group":
            return model
        if kind in ("fsdp", "tp", "tp+plain"):
            mesh = init_device_mesh("cpu", (ranks,))
        else:
            mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("outer", "inner"))
        if kind in _TENSOR_PARALLEL:
            styles: Any = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            if kind != "tp+plain":
                styles["2"] = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(model, mesh["inner"] if kind == "fsdp+tp" else mesh, styles)
        if kind in ("tp", "tp+plain"):
            return model
        if kind == "stages":
            self.shards = {mesh["outer"]: None}
        over = {"fsdp": mesh, "hsdp": mesh}.get(kind)
        if over is None:
            over = mesh["outer"] if kind == "fsdp+tp" else mesh["inner"]
        for layer in model:
            fully_shard(layer, mesh=over)
        return fully_shard(model, mesh=over)

    def backward(self, iteration: Iteration, number: int) -> None:
        history, rank = self.history, self.rank
        data = 0 if history.kind in _TENSOR_PARALLEL else rank
        generator = torch.Generator().manual_seed(100 * number + data)
        passes = iteration.micro[min(rank, len(iteration.micro) - 1)]
        for index in range(passes):
            last = index == passes - 1
            sync = history.kind != "ddp" or last
            with contextlib.nullcontext() if sync else self.model.no_sync():
                loss = self.model(torch.randn(2, 4, generator=generator)).square().mean()
                factor = dict(iteration.losses).get(rank, 1.0) if last else 1.0
                self.scaler.scale(loss * factor).backward()
        for where, which, value in iteration.gradients:
            gradient = self.parameters[which].grad
            if where == rank and gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local.view(-1)[:1] = value
        for where, which in iteration.missing:
            if where == rank:
                self.parameters[which].grad = None

    def finite(self) -> list[bool]:
        """Whether this rank's gradients are finite, for each optimizer; by torch alone."""
        found = []
        for owned in self.owned:
            gradients = [p.grad for p in owned if p.grad is not None]
            local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
            found.append(all(bool(g.isfinite().all()) for g in local))
        return found

    def clip(self, iteration: Iteration, optimizer: Any) -> str:
        scaler, kind = self.scaler, iteration.clip
        if kind == "" or self.rank in iteration.not_clipping:
            return ""
        if kind == "norm":
            scaler.clip_grad_norm_(optimizer, 0.5)
        elif kind == "value":
            scaler.clip_grad_value_(optimizer, 0.01)
        elif kind == "mesh":
            scaler.clip_grad_norm_(optimizer, 0.5, mesh=self.shards)
        elif kind == "error":
            try:
                scaler.clip_grad_norm_(optimizer, 0.5, error_if_nonfinite=True)
            except RuntimeError as error:
                if isinstance(error, NobodyComesError):
                    raise
                return "refused"
        else:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            library: Any = torch.nn.utils if kind == "torch" else fastamp
            library.clip_grad_norm_(parameters, 0.5)
        return "clipped"

    def locals(self, number: int) -> list[torch.Tensor]:
        return [
            (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
            for p in self.owned[number]
        ]

    def run(self) -> Iterator[dict[str, Any]]:
        """What each iteration has shown."""
        scaler = self.scaler
        for number, iteration in enumerate(self.history.iterations):
            self.backward(iteration, number)
            if iteration.raises == self.rank:
                raise ValueError("a fault of the program")
            row: dict[str, Any] = {"finite": self.finite(), "clips": [], "moved": []}
            before = [self.locals(k) for k in range(len(self.optimizers))]
            unscales = iteration.unscale or iteration.clip in ("torch", "fastamp")
            for optimizer in self.optimizers:
                if unscales:
                    scaler.unscale_(optimizer)
                row["clips"].append(self.clip(iteration, optimizer))
            for optimizer in self.optimizers:
                scaler.step(optimizer)
            row["skipped"] = [scaler.step_was_skipped_for(o) for o in self.optimizers]
            scaler.update()
            row["skipped later"] = [scaler.step_was_skipped_for(o) for o in self.optimizers]
            row["scale"] = scaler.get_scale()
            for k, tensors in enumerate(before):
                pairs = zip(tensors, self.locals(k), strict=True)
                row["moved"].append([not torch.equal(a, b) for a, b in pairs])
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            yield row


def run_history(history: History) -> list[Outcome]:
    """Runs it; the result of a rank is a row for each iteration that it has finished."""

    rows: list[list[dict[str, Any]]] = [[] for _ in range(history.ranks)]

    def work(rank: int) -> None:
        for row in _Program(history, rank).run():
            rows[rank].append(row)  # Also of a rank that ends early.

    outcomes = run_on_ranks(history.ranks, work, history.order)
    return [outcome._replace(result=rows[rank]) for rank, outcome in enumerate(outcomes)]


# What must hold.


def _waited(error: BaseException | None) -> bool:
    return isinstance(error, NobodyComesError) or (
        error is not None and isinstance(error.__cause__, NobodyComesError)
    )


def _fault_of_errors(history: History, outcomes: list[Outcome]) -> str | None:
    ends = [i for i, iteration in enumerate(history.iterations) if iteration.raises is not None]
    for rank, outcome in enumerate(outcomes):
        if not ends:
            if outcome.error is not None:
                return f"rank {rank}: {type(outcome.error).__name__}: {outcome.error}"
            continue
        if len(outcome.result) < ends[0]:
            return f"rank {rank} has ended before one raised: {outcome.error!r}"
        if history.iterations[ends[0]].raises == rank:
            if not isinstance(outcome.error, ValueError):
                return f"rank {rank} should have raised: {outcome.error!r}"
        elif outcome.error is not None and not _waited(outcome.error):
            return f"rank {rank}, whose peer has raised: {outcome.error!r}"
    return None


def _torch_fails_so(history: History, fault: str) -> bool:
    """Whether torch's steps alone end in this error, and on every rank.

    torch 2.15 refuses those of weights with more ranks than rows, whose gradients are replicated.
    """
    names = tuple(name.replace("fastamp", "torch") for name in history.optimizers)
    alone = replace(history, optimizers=names)

    def work(rank: int) -> None:
        program = _Program(alone, rank)
        for number, iteration in enumerate(alone.iterations):
            program.backward(iteration, number)
            for optimizer in program.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    outcomes = run_on_ranks(history.ranks, work, history.order)
    errors = {f"{type(outcome.error).__name__}: {outcome.error}" for outcome in outcomes}
    return len(errors) == 1 and fault.endswith(f": {errors.pop()}")


def _fault_of_iteration(
    number: int, history: History, rows: list[dict[str, Any]], scale: float
) -> str | None:
    iteration = history.iterations[number]
    count = len(history.optimizers)
    bad = [not all(row["finite"][k] for row in rows) for k in range(count)]
    for rank, row in enumerate(rows):
        where = f"iteration {number}, rank {rank}"
        for key in ("skipped", "skipped later"):
            if row[key] != bad:
                return f"{where}: {key} {row[key]}, expected {bad}"
        if not history.guard and row["scale"] != scale:
            return f"{where}: scale {row['scale']}, expected {scale}"
        if iteration.clip == "error":
            wanted = ["refused" if k else "clipped" for k in bad]
            if row["clips"] != wanted:
                return f"{where}: clips {row['clips']}, expected {wanted}"
        for k in range(count):
            if bad[k] and any(row["moved"][k]):
                return f"{where}: a skipped step has moved {row['moved'][k]}"
    for k in range(count):
        if not bad[k] and not any(any(row["moved"][k]) for row in rows):
            return f"iteration {number}: the step of optimizer {k} has moved nothing"
    return None


def _shape_of(outcome: Outcome) -> list[Any]:
    # What the root of a scatter gives is more than the others'.
    return [call._replace(sizes=()) if call.kind == "Scatter" else call for call in outcome.calls]


def fault_of(history: History) -> str | None:
    """Runs a history and says what does not hold, in one line; None if all does."""
    outcomes = run_history(history)
    fault = _fault_of_errors(history, outcomes)
    if fault is not None:
        return None if _torch_fails_so(history, fault) else fault
    model = ScaleModel(8.0, **dict(history.rules))
    ended = min(len(outcome.result) for outcome in outcomes)
    for number in range(ended):
        rows = [outcome.result[number] for outcome in outcomes]
        model.step(not all(all(row["finite"]) for row in rows))
        fault = _fault_of_iteration(number, history, rows, model.scale)
        if fault is not None:
            return fault
    if ended == len(history.iterations):
        for rank, outcome in enumerate(outcomes):
            if _shape_of(outcome) != _shape_of(outcomes[0]):
                return (
                    f"rank {rank} made {len(outcome.calls)} collectives, rank 0 "
                    f"{len(outcomes[0].calls)}, or others: {_first_other(outcomes[0], outcome)}"
                )
    return None


def _first_other(one: Outcome, other: Outcome) -> Any:
    pairs = zip(_shape_of(one), _shape_of(other), strict=False)
    return next(((i, a, b) for i, (a, b) in enumerate(pairs) if a != b), None)


def _smaller(history: History) -> Iterator[History]:
    """Histories that lack a part of one, the largest parts first."""
    iterations = history.iterations
    if len(iterations) > 1:
        for i in range(len(iterations)):
            yield replace(history, iterations=iterations[:i] + iterations[i + 1 :])
    even = history.kind in ("hsdp", "fsdp+tp", "stages")
    for ranks in (2, history.ranks // 2, history.ranks - (2 if even else 1)):
        if 2 <= ranks < history.ranks and not (even and ranks % 2):
            kept = tuple(_on_ranks(iteration, ranks) for iteration in iterations)
            yield replace(history, ranks=ranks, iterations=kept)
    if len(history.optimizers) > 1:
        yield replace(history, optimizers=history.optimizers[:-1])
    for name in ("rules", "order"):
        if getattr(history, name):
            yield replace(history, **{name: type(getattr(history, name))()})
    plain = Iteration()
    for i, iteration in enumerate(iterations):
        for name, value in vars(plain).items():
            now = getattr(iteration, name)
            if now == value:
                continue
            less = [value]
            if isinstance(now, tuple) and name != "micro":
                less += [now[:j] + now[j + 1 :] for j in range(len(now))]
            for wanted in less:
                changed = replace(iteration, **{name: wanted})
                yield replace(history, iterations=(*iterations[:i], changed, *iterations[i + 1 :]))


def _on_ranks(iteration: Iteration, ranks: int) -> Iteration:
    def below(entries: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(e for e in entries if (e if isinstance(e, int) else e[0]) < ranks)

    raises = iteration.raises
    return replace(
        iteration,
        losses=below(iteration.losses),
        gradients=below(iteration.gradients),
        missing=below(iteration.missing),
        not_clipping=below(iteration.not_clipping),
        raises=raises if raises is not None and raises < ranks else None,
    )


def shrunk(history: History) -> tuple[History, str]:
    """Returns the smallest history that was found which fails, and its fault."""
    fault = fault_of(history)
    assert fault is not None, f"expected a history that fails, got {history}"
    while True:
        for smaller in _smaller(history):
            found = fault_of(smaller)
            if found is not None:
                history, fault = smaller, found
                break
        else:
            return history, fault
