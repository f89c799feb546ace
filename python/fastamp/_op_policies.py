# SPDX-License-Identifier: Apache-2.0
"""Op policies for a part of a program: one thread, one ``with`` block or function."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch.utils.checkpoint

import fastamp._C as _C
from fastamp import _compile

__all__ = ["op_policies"]


class op_policies(contextlib.ContextDecorator):  # noqa: N801 (used like torch.no_grad)
    """Changes op policies on this thread inside a ``with`` block or a decorated function.

    ::

        with fastamp.autocast("cuda"), fastamp.op_policies({"layer_norm": "lower"}):
            loss = loss_fn(model(x), y)

    The changes win over :func:`fastamp.set_op_policy`'s and those of enclosing blocks, and act only
    inside autocast regions. ``torch.utils.checkpoint`` recomputes under the policies of its forward
    pass. While any thread is inside a block, compiled functions run eagerly, in all threads: their
    graphs hold the policies of the process (an edit by :func:`fastamp.set_op_policy` compiles new
    ones). Other threads are not affected, in particular those that run a backward pass on CUDA, nor
    are exported programs, which follow the policies of the process in which they run.

    An object may be entered again, nested, used by several threads, and left in another order than
    it was entered.

    Args:
        policies: Policy by op: names as for :func:`fastamp.set_op_policy`.
        device: ``"cpu"``, ``"cuda"``, or both by default.

    Raises:
        ValueError: On entering: an unknown op (the nearest names are given), policy or device, or
            a policy the op cannot carry. Nothing is changed then.
    """

    def __init__(self, policies: Mapping[str, str], device: str | None = None) -> None:
        """Keeps the edits; they are checked when the block is entered."""
        self._edits = list(policies.items())
        self._device = device
        self._frames = threading.local()

    def __enter__(self) -> op_policies:
        """Checks the edits and puts them in force."""
        block = _Block(_C.checked_op_policies(self._edits, self._device), replace=False)
        if not hasattr(self._frames, "stack"):
            self._frames.stack = []
        self._frames.stack.append(block)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Takes the edits back. Blocks may be left in any order.

        Raises:
            RuntimeError: This object is not entered on this thread. Nothing is changed.
        """
        stack: list[_Block] = getattr(self._frames, "stack", [])
        if not stack:
            raise RuntimeError(
                "op_policies.__exit__: expected a block that was entered on this thread and not "
                "left yet, got one that was not"
            )
        stack.pop().leave()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles carry the edits and no open block."""
        return op_policies, (dict(self._edits), self._device)


def _keep_out_of_graphs() -> None:
    import torch._dynamo

    reason = "fastamp.op_policies changes what ops do on this thread: its block runs eagerly"
    for name in ("__init__", "__enter__", "__exit__"):
        disable: Any = torch._dynamo.disable
        method = disable(vars(op_policies)[name], reason=reason)
        setattr(op_policies, name, method)


_compile.when_dynamo_loads(_keep_out_of_graphs)

_lock = threading.Lock()
_open_blocks = 0


class _Block:
    """One entered block. While any is, checkpoint is wrapped and compiled functions run eagerly."""

    def __init__(self, overrides: Any, *, replace: bool) -> None:
        global _open_blocks
        self._open = False
        with _lock:
            if _open_blocks == 0:
                _follow_checkpoints()
                _compile.run_eagerly(True)
            _open_blocks += 1
        self._open = True
        self._pushed = _C.push_op_policies(overrides, replace)

    def leave(self) -> None:
        _C.pop_op_policies(self._pushed)
        self.__del__()

    def __del__(self) -> None:
        # Reached without leave() when a thread ends inside a block: its overrides end with it.
        global _open_blocks
        if not self._open:
            return
        self._open = False
        with _lock:
            _open_blocks -= 1
            if _open_blocks == 0:
                _compile.run_eagerly(False)
                _forget_checkpoints()


def _carrying(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, made to run under the policies that this thread has now."""
    overrides = _C.thread_op_policies()
    if not overrides:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        block = _Block(overrides, replace=True)
        try:
            return function(*args, **kwargs)
        finally:
            block.leave()

    return run


# torch.utils.checkpoint hands autocast's public state to its recomputation and has no place for
# ours. All its variants get the function to recompute through names that are looked up at each
# call, so those names are wrapped, and only while some thread is in a block. The function is their
# first argument. From 2.15 on, if not before, the generator has an _impl that is called instead.
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"
_GENERATOR = "_checkpoint_without_reentrant_generator"
_GENERATORS = (f"{_GENERATOR}_impl", _GENERATOR)
_wrapped: list[tuple[Any, str, Any]] = []


def _wrap(owner: Any, name: str, replacement: Any) -> None:
    _wrapped.append((owner, name, vars(owner)[name]))
    setattr(owner, name, replacement)


def _follow_checkpoints() -> None:
    reentrant: Any = torch.utils.checkpoint.CheckpointFunction
    torch_forward = reentrant.forward

    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return torch_forward(ctx, _carrying(run_function), *args)

    _wrap(reentrant, "forward", staticmethod(forward))
    for module in (torch.utils.checkpoint, sys.modules.get(_COMPOSABLE)):
        # The innermost that there is: wrapping both would only nest blocks.
        name = (
            next((name for name in _GENERATORS if name in vars(module)), None) if module else None
        )
        if name is not None:
            _wrap(module, name, _following(vars(module)[name]))


def _following(torch_generator: Callable[..., Any]) -> Callable[..., Any]:
    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return torch_generator(_carrying(fn), *args, **kwargs)

    return generator


def _forget_checkpoints() -> None:
    while _wrapped:
        setattr(*_wrapped.pop())
