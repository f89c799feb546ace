# SPDX-License-Identifier: Apache-2.0
"""One job under plain torch.amp and under an installed fastamp, compared bit for bit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten_with_path

import fastamp
import fastamp._C as _C
from fastamp._cli import float8_command


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@contextmanager
def repeatable() -> Iterator[None]:
    """Deterministic algorithms where there is a GPU, whose atomics add in any order else."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextmanager
def plain_torch() -> Iterator[None]:
    """torch's own classes and kernels, seeded."""
    assert not fastamp.is_installed()
    with fastamp.debug.torch_kernels(), repeatable():
        seed()
        yield


@contextmanager
def installed_fastamp() -> Iterator[None]:
    """fastamp in place of torch.amp, seeded."""
    with fastamp.install(), repeatable():
        seed()
        yield


@contextmanager
def region_counts() -> Iterator[list[int]]:
    """How many native regions of ``torch.autocast`` were open at each call of a module."""
    counts: list[int] = []
    hook = register_module_forward_pre_hook(lambda *_: counts.append(_C.open_torch_regions()))
    try:
        yield counts
    finally:
        hook.remove()


def assert_same(own: Any, torchs: Any) -> None:
    """Two trees of tensors and plain values are equal: structure, dtypes, shapes, bits."""
    own_leaves, own_spec = tree_flatten_with_path(own)
    torchs_leaves, torchs_spec = tree_flatten_with_path(torchs)
    assert own_spec == torchs_spec
    for (path, a), (_, b) in zip(own_leaves, torchs_leaves, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(
                a, b, rtol=0, atol=0, equal_nan=True, msg=lambda text, path=path: f"{path}: {text}"
            )
        else:
            assert a == b or (a != a and b != b), f"{path}: {a} != {b}"


def same_results(job: Callable[[], Any], witness: bool = True) -> Any:
    """Runs ``job`` under torch.amp and under fastamp, requires equal results, returns fastamp's.

    Args:
        job: Makes everything it needs anew; the generators are seeded before each call.
        witness: Whether modules are called in ``torch.autocast`` regions, which then must be
            native in our run and none of fastamp in torch's.
    """
    if not witness:
        with plain_torch():
            torchs = job()
        with installed_fastamp():
            own = job()
    else:
        with region_counts() as counts, plain_torch():
            torchs = job()
        assert counts
        assert not any(counts)
        with region_counts() as counts, installed_fastamp():
            own = job()
        assert any(counts)
    assert_same(own, torchs)
    return own


def is_fastamps(scaler: Any) -> bool:
    """Whether a scaler's class is what this run's ``torch.amp.GradScaler(...)`` must make."""
    return isinstance(scaler, fastamp.GradScaler) == fastamp.is_installed()


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers on the CPU, for comparisons."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def close_in_float8(job: Callable[[], tuple[list[float], nn.Module]], exclude: str) -> None:
    """Runs ``job`` on fastamp without ``--float8`` and with it, and compares.

    Args:
        job: Makes everything it needs anew, trains in bfloat16 regions, and returns its losses and
            what it trained; the generators are seeded before each call.
        exclude: Name of weights that the model has and that are to stay out of fp8.
    """
    with installed_fastamp(), fastamp.debug.trace() as trace:
        losses, model = job()
    assert {row.float8 for row in trace.rows} == {""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is slow
        running = float8_command.start([exclude])
        with running, installed_fastamp(), fastamp.debug.trace() as trace:
            float8_losses, float8_model = job()
    outcomes = {row.float8 for row in trace.rows}
    assert {"float8", "excluded"} <= outcomes, outcomes
    own, torchs = float8_model.state_dict(), model.state_dict()
    assert list(own) == list(torchs)
    assert [value.dtype for value in own.values()] == [value.dtype for value in torchs.values()]
    assert [value.shape for value in own.values()] == [value.shape for value in torchs.values()]
    assert all(value.isfinite().all() for value in own.values())
    assert len(losses) == len(float8_losses) >= 4
    assert losses != float8_losses
    for loss, float8_loss in zip(losses, float8_losses, strict=True):
        assert abs(float8_loss - loss) <= 0.05 * abs(loss), (losses, float8_losses)
    assert float8_losses[-1] < 0.95 * float8_losses[0], float8_losses
