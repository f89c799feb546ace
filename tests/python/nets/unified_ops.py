# SPDX-License-Identifier: Apache-2.0
"""Calls with mixed dtypes of every op that torch's operator database knows, under "unify".

Each call runs with torch's kernels, and with fastamp's under the preset. What torch accepts has to
stay as it is. What it refuses, and accepts once the arguments are cast by hand, has to be cured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

import fastamp
from nets.all_ops import (
    FLOATS,
    REGIONS,
    UNDEFINED_VALUES,
    Call,
    Refusal,
    Samples,
    arguments,
    calls,
    database,
    difference,
    fake_results,
    fastamp_region,
    leaves,
    run,
)
from support.autocast_state import torch_kernels

# They write running statistics, of which a cast by hand would make copies.
WRITES_STATISTICS = {
    "_batch_norm_with_update",
    "_native_batch_norm_legit",
    "native_batch_norm",
    "nn.functional.batch_norm",
    "nn.functional.instance_norm",
}

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class Tally:
    """What became of calls.

    Attributes:
        became: Number of calls by outcome.
        cured_ops: Ops of which a call was cured.
        wrong: Texts on calls that are not as they should be.
    """

    became: Counter[str] = field(default_factory=Counter)
    cured_ops: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{dict(self.became)}, cured in {len(self.cured_ops)} ops"


def casting(to: torch.dtype) -> Wrap:
    """Casts the arguments by hand before a function is called: all but those that it writes."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*tree_map(cast, args), **tree_map(cast, kwargs))

        return call

    def cast(value: Any) -> Any:
        castable = isinstance(value, torch.Tensor) and value.dtype in FLOATS
        return value.to(to) if castable else value

    return wrap


def following(function: Callable[..., Any]) -> Callable[..., Any]:
    """Casts the arguments of a function to the dtype of the one that it writes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        written = args[0] if out is None else out[0] if isinstance(out, (tuple, list)) else out
        cast = casting(written.dtype)(lambda *a, **k: (a, k))
        others, named = cast(*args[out is None :], **{k: kwargs[k] for k in kwargs if k != "out"})
        if out is not None:
            return function(*others, out=out, **named)
        return function(args[0], *others, **named)

    return call


def torch_region(call: Call) -> Callable[[], Any]:
    return lambda: torch.autocast("cpu", dtype=getattr(torch, call.region))


def by_hand(samples: Samples, call: Call) -> list[Any]:
    """Results of the casts that may cure a call, with torch's kernels; Refusals left out."""
    if call.op in WRITES_STATISTICS:
        return []
    if call.form in ("inplace", "out"):
        wraps: list[Wrap] = [following]
    else:
        wraps = [casting(getattr(torch, call.region)), casting(torch.float32)]
    with torch_kernels():
        results = [run(samples, call, torch_region(call), wrap) for wrap in wraps]
    return [result for result in results if not isinstance(result, Refusal)]


def is_mixed(values: Any) -> bool:
    """Whether arguments have several of the dtypes that casts unify."""
    return len({leaf.dtype for leaf in leaves(values) if leaf.dtype in FLOATS}) > 1


def is_forward_accepted(samples: Samples, call: Call) -> bool:
    """Whether torch takes a call, and refuses no more than its backward pass."""
    with torch_kernels():
        return not isinstance(run(samples, replace(call, grad=False), torch_region(call)), Refusal)


def is_forward_cured(samples: Samples, call: Call) -> bool:
    """Whether the call alone runs, without a backward pass and without ``out``."""
    form = "function" if call.form == "out" else call.form
    alone = replace(call, grad=False, form=form)
    with fastamp.policies.preset("unify"):
        return not isinstance(run(samples, alone, fastamp_region(alone)), Refusal)


def judge(samples: Samples, call: Call, torchs: Any, own: Any, tally: Tally) -> None:
    values = call.op not in UNDEFINED_VALUES
    if not isinstance(torchs, Refusal):
        text = difference(own, torchs, values)
        tally.became["changed" if text else "accepted"] += 1
        if text:
            tally.wrong.append(f"{call}\naccepted by torch, and changed: {text}")
        return
    possible = by_hand(samples, call)
    if isinstance(own, Refusal):
        is_left = bool(possible) and not (call.grad and is_forward_accepted(samples, call))
        if not is_left and own.kind is not torchs.kind and is_forward_cured(samples, call):
            tally.became["cured, and refused later, as by hand"] += 1
            return
        tally.became["left" if is_left else "curable by no cast of the call"] += 1
        if is_left or own.kind is not torchs.kind:
            tally.wrong.append(f"{call}\ntorch: {torchs}\nfastamp: {own}\nby hand: {possible}")
        return
    tally.cured_ops.add(call.op)
    same = any(not difference(own, result, values) for result in possible)
    tally.became["cured" if same else "cured inside"] += 1


def mixed_calls(op: Any, samples: Samples, seed: int, share: float) -> Iterator[Call]:
    return (
        call
        for call in calls(op, samples, seed, share, kinds=("mixed",))
        if is_mixed(arguments(samples, call))
    )


#: Ops that take their turns together: kernels of all ops are registered and dropped each time.
BATCH = 60


def unified(seed: int, share: float, only: str = "") -> Tally:
    """Judges calls of all ops in regions on the CPU."""
    tally = Tally()
    names = [only] if only else list(database())
    for first in range(0, len(names), BATCH):
        all_samples = [Samples(database()[name]) for name in names[first : first + BATCH]]
        jobs = [
            (samples, call)
            for samples in all_samples
            for call in mixed_calls(samples.op, samples, seed, share)
        ]
        with torch_kernels():
            torchs = [run(samples, call, torch_region(call)) for samples, call in jobs]
        with fastamp.policies.preset("unify"):
            own = [run(samples, call, fastamp_region(call)) for samples, call in jobs]
        for (samples, call), a, b in zip(jobs, torchs, own, strict=True):
            judge(samples, call, a, b, tally)
    return tally


# -- CUDA, on tensors without values -------------------------------------------------------------


def unified_on_cuda(seed: int, share: float) -> Tally:
    """Judges the dtypes that calls of all ops give in CUDA regions, on fake tensors."""
    tally = Tally()
    jobs = []
    for op in database().values():
        samples = Samples(op)
        some = [c for c in mixed_calls(op, samples, seed, share) if c.form == "function"]
        jobs += [(samples, some, dtype) for dtype in REGIONS if some]
    with torch_kernels():
        torchs = [fake_results(*job) for job in jobs]
        cast = [[fake_results(*job, casting(to)) for to in (job[2], torch.float32)] for job in jobs]
    with fastamp.policies.preset("unify"):
        own = [fake_results(*job) for job in jobs]
    for (_, some, dtype), *results, hand in zip(jobs, torchs, own, cast, strict=True):
        for call, a, b, *possible in zip(some, *results, *hand, strict=True):
            runs = [each for each in possible if not isinstance(each, Refusal)]
            _judge_fake(f"{call} on CUDA in {dtype}", a, b, runs, tally)
    return tally


#: How torch refuses calls whose code for tensors without numbers asks the GPU itself.
WITHOUT_A_GPU = ("Found no NVIDIA driver", "CUDA driver version is insufficient")


def _judge_fake(call: str, torchs: Any, own: Any, possible: list[Any], tally: Tally) -> None:
    if not isinstance(torchs, Refusal):
        tally.became["accepted" if own == torchs else "changed"] += 1
        if own != torchs:
            tally.wrong.append(f"{call}\ntorch: {torchs}\nfastamp: {own}")
    elif own == torchs and any(text in torchs.text for text in WITHOUT_A_GPU):
        tally.became["to be seen with a GPU alone"] += 1
    elif isinstance(own, Refusal):
        tally.became["left" if possible else "curable by no cast of the call"] += 1
        if possible or own.kind is not torchs.kind:
            tally.wrong.append(f"{call}\ntorch: {torchs}\nfastamp: {own}\nby hand: {possible}")
    else:
        tally.became["cured" if own in possible else "cured inside"] += 1
