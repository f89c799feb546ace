# SPDX-License-Identifier: Apache-2.0
"""Whole programs in fp8: ``python -m fastamp --float8 script.py``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from fastamp import _C
from fastamp._cli.float8_names import NamedExclusions
from fastamp._dynamo import carried_state
from fastamp._float8.recipe import Float8Recipe, default_recipe
from fastamp._install.installation import in_spawned_processes
from fastamp._util.at_exit import AtExit, warn_at_exit

__all__ = ["start"]


def start(exclude: Sequence[str] = ()) -> ExitStack:
    """Makes each bfloat16 region of the process follow the default recipe, from now on.

    That is: regions on cpu and cuda, of torch's class and of fastamp's, in all threads, that name
    no recipe of their own and not ``float8=False``. Processes that ``multiprocessing`` starts do
    the same. Compiled functions run eagerly, as in any fp8 region.

    Args:
        exclude: Names of weights that stay out, see :class:`NamedExclusions`.

    Returns:
        Ends it when it is closed.

    Warns:
        UserWarning: The first time that a region on the CPU runs a product in fp8, which is slow;
            when CUDA is initialized on a GPU without fp8, whose regions stay as they are; at exit,
            if a name of ``exclude`` is of none of the program's weights, or if the program ran
            products in regions of float16 and none in a region with a recipe.
    """
    running = ExitStack()
    running.callback(AtExit(_warn_of_float16).cancel)
    if exclude:
        running.callback(NamedExclusions(exclude).close)
    carried_state.hold()
    running.callback(carried_state.let_go)
    running.enter_context(default_recipe("cpu", Float8Recipe()))

    ended = threading.Event()
    running.callback(ended.set)

    def start_on_gpu() -> None:
        if not ended.is_set():
            running.enter_context(default_recipe("cuda", Float8Recipe()))

    # Not now: asking for the GPU's kind initializes CUDA, and the program may be about to fork.
    torch.cuda._lazy_call(start_on_gpu)  # type: ignore[no-untyped-call]
    running.enter_context(in_spawned_processes(start, tuple(exclude)))
    return running


def _warn_of_float16() -> None:
    uses = {device: _C.default_float8_use(device) for device in ("cpu", "cuda")}
    met = [device for device, (_, met_float16) in uses.items() if met_float16]
    if met and not any(acted for acted, _ in uses.values()):
        warn_at_exit(
            f"--float8: expected regions of bfloat16, which would run in fp8, got float16 alone "
            f"(on {' and '.join(met)}), so no product ran in fp8. Let the program's regions have "
            f"dtype=torch.bfloat16, or a recipe of their own, as in fastamp.autocast(device, "
            f"dtype=torch.float16, float8=True)."
        )
