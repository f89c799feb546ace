# SPDX-License-Identifier: Apache-2.0
"""Training by what is stored: low-precision weights beside torch.amp, with the memory of a run.

Calculated bytes stand in docs/optim.md; here the allocator counts, with all that a model has beside
low-precision weights: embeddings, norms, casts that a region keeps, activations.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import fastamp
from benchmarks.counts import MEBI, memory_levels
from benchmarks.harness import BASELINE, FASTAMP, Candidate, Facts, Row
from benchmarks.models import Workload, gpt2, text
from benchmarks.sides import own_optimizers
from benchmarks.training import Training

GROUP = "Training by layout"
DTYPE = torch.bfloat16
KEPT = "bytes kept per parameter"
PEAK = "peak bytes per parameter"
# Passes whose gradients are summed, so that all there is to keep is there at the end of the last
# forward pass; and steps, so that states and kept casts are.
PASSES, STEPS = 2, 3

_NARROW = {"state_dtype": DTYPE}
_CODES = {"state_dtype": "8bit"}
_REMAINDERS = {"master": "remainder"}


@dataclass(frozen=True)
class Layout:
    """Storage of weights.

    Attributes:
        options: The optimizer's.
        grads: dtype of the gradients of low-precision weights; None for other weights.
        is_low: Whether all parameters are in 16 bits.
    """

    options: dict[str, Any]
    grads: torch.dtype | None = None
    is_low: bool = False


# In the order of docs/optim.md. torch.amp and its fused AdamW are not among them.
LAYOUTS = {
    FASTAMP: Layout({"autocast_dtype": DTYPE}),
    "bf16 moments": Layout({"autocast_dtype": DTYPE, **_NARROW}),
    "8-bit moments": Layout({"autocast_dtype": DTYPE, **_CODES}),
    "16-bit weights": Layout({}, torch.float32),
    "16-bit weights, remainders": Layout(_REMAINDERS, torch.float32),
    "16-bit weights, remainders, bf16 moments": Layout({**_REMAINDERS, **_NARROW}, torch.float32),
    "16-bit weights, bf16 gradients, remainders": Layout(_REMAINDERS, DTYPE),
    "16-bit weights, bf16 gradients, remainders, bf16 moments": Layout(
        {**_REMAINDERS, **_NARROW}, DTYPE
    ),
    "16-bit weights, bf16 gradients, remainders, 8-bit moments": Layout(
        {**_REMAINDERS, **_CODES}, DTYPE
    ),
    "bf16 parameters": Layout({}, is_low=True),
    "bf16 parameters, remainders": Layout(_REMAINDERS, is_low=True),
    "bf16 parameters, remainders, bf16 moments": Layout({**_REMAINDERS, **_NARROW}, is_low=True),
    "bf16 parameters, remainders, 8-bit moments": Layout({**_REMAINDERS, **_CODES}, is_low=True),
}
# What is timed; more would take the memory of a small machine.
TIMED = (
    BASELINE,
    FASTAMP,
    "16-bit weights",
    "16-bit weights, bf16 gradients, remainders, bf16 moments",
)


def stored_in(layout: Layout, model: torch.nn.Module, example: Any, **options: Any) -> Any:
    """Stores a model's weights in a layout; returns fastamp's AdamW that stores its state so.

    Args:
        layout: How.
        model: Changed in place.
        example: Its input: such weights are found by a forward pass.
        **options: The optimizer's others.
    """
    if layout.is_low:
        model.to(DTYPE)
    elif layout.grads is not None:
        fastamp.optim.low_precision_weights_(
            model, DTYPE, grads=layout.grads, example_inputs=example, verbose=False
        )
    return own_optimizers().AdamW(model.parameters(), **options, **layout.options)


def training_in(name: str, workload: Workload, device: str) -> Training:
    """Returns a model in training whose weights and states are stored so."""
    if name == BASELINE:
        return Training(workload, BASELINE, device, DTYPE)
    layout = LAYOUTS[name]
    training = Training(workload, FASTAMP, device, DTYPE)
    training.optimizer = stored_in(layout, training.model, training.x, lr=workload.lr)
    return training


def _run(name: str, workload: Workload, device: str, mark: Any) -> int:
    """Trains for some steps and frees everything; marks when all that is kept is there."""
    training = training_in(name, workload, device)
    count = sum(parameter.numel() for parameter in training.model.parameters())
    training.before()
    try:
        for step in range(STEPS):
            training.optimizer.zero_grad()
            for each in range(PASSES):
                loss = training.forward()
                if (step, each) == (STEPS - 1, PASSES - 1):
                    mark()
                loss.backward()  # type: ignore[no-untyped-call]
            training.optimizer.step()
    finally:
        training.after()
    return count


def memory_of(name: str, workload: Workload, device: str) -> dict[str, float]:
    """Returns what a run keeps in a forward pass, and its peak, in bytes per parameter.

    Raises:
        RuntimeError: Something of it was still allocated afterwards: the counts would be wrong.
    """
    counted: list[int] = []

    def whole(mark: Any) -> None:
        counted.append(_run(name, workload, device, mark))
        gc.collect()
        fastamp.casts.drop()

    kept, peak, left = memory_levels(whole, device)
    if left > 0.01 * peak:
        raise RuntimeError(f"{name}: {left / MEBI:.1f} of {peak / MEBI:.1f} MiB are still there")
    return {KEPT: kept / counted[0], PEAK: peak / counted[0], "MiB peak": peak / MEBI}


def _facts(workload: Workload, device: str, quick: bool) -> Facts:
    del quick  # a few steps either way
    # What libraries allocate once would be counted as left over.
    for name in (BASELINE, FASTAMP):
        _run(name, workload, device, lambda: None)
    return {name: memory_of(name, workload, device) for name in (BASELINE, *LAYOUTS)}


def _candidates(workload: Workload, device: str) -> dict[str, Candidate]:
    found = {}
    for name in TIMED:
        training = training_in(name, workload, device)
        training.warm_up()
        found[name] = training.candidate()
    return found


def _workload(device: str) -> Workload:
    # Few tokens, so that activations are small beside the weights; a vocabulary of bytes for the
    # same reason, as embeddings stay float32.
    sizes = {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 512, "n_positions": 128}
    if device == "cuda":
        sizes.update(n_layer=12, n_embd=768, n_head=12)
    sizes.update(bos_token_id=0, eos_token_id=0)
    name = f"GPT-2 of {sizes['n_layer']} layers of {sizes['n_embd']}"
    return Workload(name, "tokens", partial(gpt2, **sizes), text(16), 1, 16)


def rows(device: str) -> list[Row]:
    """Returns the rows of one device."""
    workload = _workload(device)
    return [
        Row(
            f"{device}: 16-bit weights: {workload.name}, {workload.units} tokens, bf16",
            partial(_candidates, workload, device),
            GROUP,
            device,
            work=(workload.batch * workload.units, workload.unit),
            facts=partial(_facts, workload, device),
            weight=12.0,
        )
    ]
