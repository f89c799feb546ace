# SPDX-License-Identifier: Apache-2.0
"""Runs programs twice in this process and compares what they recorded."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from textwrap import dedent, indent
from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

import fastamp
from nets.all_ops import difference
from nets.program_text import Program, smaller
from support.autocast_state import TORCH_LOSES_GRADIENTS, torch_kernels

# What programs may differ in, by the errors that torch then has (docs/compatibility.md).
DOCUMENTED = ("Unexpected floating ScalarType",)


def tried(call: Callable[[], Any]) -> Any:
    """What a call returns, or the name of what it raises."""
    try:
        return call()
    except Exception as error:  # compared with the other run's
        is_signal = type(error).__name__ == "_StopRecomputationError"  # of checkpoint, to itself
        if is_signal or any(text in str(error) for text in DOCUMENTED):
            raise
        return f"raised {type(error).__name__}"


def in_threads(new: bool, *functions: Callable[[], Any]) -> None:
    """Runs functions on threads: one after the other for the reference, else at once."""
    errors: list[Exception] = []

    def guarded(function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
        if not new:
            thread.join()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def make_functions(custom_fwd: Any, custom_bwd: Any) -> dict[str, Any]:
    """Custom autograd functions under one library's decorators, and under none."""

    def function(fwd: Callable[[Any], Any], bwd: Callable[[Any], Any]) -> Any:
        class Product(torch.autograd.Function):
            @staticmethod
            @fwd
            def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(a, b)
                return a.mm(b)

            @staticmethod
            @bwd
            def backward(ctx: Any, grad: torch.Tensor) -> Any:
                a, b = ctx.saved_tensors
                return grad.mm(b.t()).to(a.dtype), a.t().mm(grad).to(b.dtype)

        return Product

    same = lambda f: f  # noqa: E731
    cpu = {"device_type": "cpu"}
    return {
        "plain": function(same, same),
        "carried": function(custom_fwd(**cpu), custom_bwd(**cpu)),
        "float32": function(custom_fwd(**cpu, cast_inputs=torch.float32), custom_bwd(**cpu)),
        "bfloat16": function(custom_fwd(**cpu, cast_inputs=torch.bfloat16), custom_bwd(**cpu)),
    }


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def names_for(new: bool, reference: str, installed: bool) -> dict[str, Any]:
    """What programs can name."""
    own = new or reference == "fastamp"
    lib: Any = fastamp if own and not installed else torch.amp
    functions = make_functions(lib.custom_fwd, lib.custom_bwd)
    return {
        "NEW": new,
        "F": torch.nn.functional,
        "Scaler": lib.GradScaler,
        "amp": lib.autocast,
        "checkpoint": checkpoint,
        "copy": copy,
        "fastamp": fastamp,
        "functions": functions,
        "has_gradients": has_gradients,
        "in_threads": lambda *f: in_threads(new, *f),
        "inf": float("inf"),
        "nan": float("nan"),
        "nn": torch.nn,
        "pickle": pickle,
        "torch": torch,
        "tried": tried,
    }


class UndecidedError(Exception):
    """A program that runs into a documented difference."""


def run(program: Program, code: Any, new: bool) -> list[Any]:
    """What a program records; an error is its last record."""
    records: list[Any] = []

    def record(*values: Any) -> None:
        for value in tree_flatten(values)[0]:
            if isinstance(value, torch.Tensor):
                value = value.detach().clone()
            records.append(value)

    def use(call: Callable[[], Any], instead: Any) -> Any:
        """What a call returns; if it raises, that is recorded and something else goes on."""
        result = tried(call)
        if isinstance(result, str):
            record(result)
            return instead
        return result

    space = names_for(new, program.reference, program.installed)
    space |= {"record": record, "use": use}
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if new and program.installed:
            stack.enter_context(fastamp.install())
        torch.manual_seed(program.seed)
        exec(code, space)
        complete = False
        try:
            space["program"]()
            complete = True
        except Exception as error:  # compared with the other run's
            text = str(error)
            if not new and any(known in text for known in DOCUMENTED):
                records = [UndecidedError(text)]
            else:
                records.append(f"ended by {type(error).__name__}")
                space["error"] = text
    if not complete:
        # torch's checkpoint leaves its hooks in place, for the next program too, until the
        # generator goes that an error has ended; which is in a cycle with the error.
        gc.collect()
    torch.clear_autocast_cache()
    return records


@contextmanager
def kernels_of(reference: str) -> Iterator[None]:
    if reference == "torch":
        with torch_kernels():
            yield
    else:
        yield


def _compiled(program: Program) -> Any:
    return compile(f"def program():\n{program.source()}\n", f"<program {program.seed}>", "exec")


def compare(programs: list[Program]) -> Iterator[tuple[Program, str, list[Any]]]:
    """Each program with what differs ("" for nothing), and what its second run recorded."""
    if len(programs) > 1:
        gc.collect()  # graphs in cycles, of checkpoints
    codes = [_compiled(program) for program in programs]
    expected: dict[int, list[Any]] = {}
    for reference in ("torch", "fastamp"):
        with kernels_of(reference):
            for i, program in enumerate(programs):
                if program.reference == reference:
                    expected[i] = run(program, codes[i], new=False)
    for i, program in enumerate(programs):
        torchs = expected[i]
        if torchs and isinstance(torchs[-1], UndecidedError):
            yield program, "", torchs
            continue
        own = run(program, codes[i], new=True)
        text = differing_record(own, torchs)
        if text and TORCH_LOSES_GRADIENTS and program.reference == "torch":
            # Its cache may have kept a cast without a history: it is a reference without the cache.
            with no_cast_cache():
                with kernels_of("torch"):
                    torchs = run(program, codes[i], new=False)
                alone = run(program, codes[i], new=True)
            if not differing_record(alone, torchs):
                text, own = "", [UndecidedError(text)]
        yield program, text, own


@contextmanager
def no_cast_cache() -> Iterator[None]:
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def differing_record(own: list[Any], torchs: list[Any]) -> str:
    for i, (a, b) in enumerate(zip(own, torchs, strict=False)):
        text = difference([[a], [], []], [[b], [], []])
        if text:
            return f"record {i}: {text}"
    if len(own) != len(torchs):
        return f"{len(torchs)} records in the reference, {len(own)} here"
    return ""


def fails(program: Program) -> str:
    return next(text for _, text, _ in compare([program]))


def still_fails(program: Program) -> bool:
    try:
        return bool(fails(program))
    except SyntaxError:
        return False


def shrink(program: Program, seconds: float = 20) -> Program:
    """The program without all statements that it fails without, as far as the time lasts."""
    end = time.process_time() + seconds
    start, found = 0, True
    while found or start > 0:
        # What is before the last success was of no use then: it is tried again at the end.
        start = start if found else 0
        found = False
        for at, candidate in enumerate(islice(smaller(program), start, None), start):
            if time.process_time() > end:
                return program
            if still_fails(candidate):
                program, start, found = candidate, at, True
                break
    return program


SCRIPT = """\
# PYTHONPATH=tests/python python this_file.py
from nets.program_runs import replay


def program():
{source}


replay(program, seed={seed}, reference="{reference}", installed={installed})
"""


def script(program: Program) -> str:
    """The program as a file that runs by itself and says what differs."""
    return SCRIPT.format(
        source=program.source(),
        seed=program.seed,
        reference=program.reference,
        installed=program.installed,
    )


def replay(function: Callable[[], None], seed: int, reference: str, installed: bool) -> str:
    """Runs a program that script() printed, and prints and returns what differs."""
    body = dedent("".join(inspect.getsourcelines(function)[0][1:]))
    program = Program(seed, reference, (body.rstrip(),), installed)
    text = fails(program)
    print(text or "the same")
    return text


def failures(programs: Iterator[Program], most: int = 3) -> tuple[Counter[str], list[str]]:
    """Runs programs, a hundred under one set of kernels.

    Returns:
        How the programs ended, and the scripts of at most so many that differ, shrunk.
    """
    ends: Counter[str] = Counter()
    texts: list[str] = []
    while some := list(islice(programs, 100)):
        for program, text, records in compare(some):
            last = records[-1] if records else None
            undecided = isinstance(last, UndecidedError)
            early = isinstance(last, str) and last.startswith("ended by")
            ends["undecided" if undecided else "ended early" if early else "ran"] += 1
            ends["differ"] += bool(text)
            if text and len(texts) < most:
                least = shrink(program)
                reason = fails(least) or f"once only: {text}"
                texts.append(f"{script(least)}\n{indent(reason, '# ')}")
    return ends, texts
