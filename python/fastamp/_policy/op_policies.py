# SPDX-License-Identifier: Apache-2.0
"""Op policies for a part of a program: one thread, one ``with`` block or function."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import fastamp._C as _C
from fastamp._dynamo import carried_state, compiler
from fastamp._policy.presets import preset_policies
from fastamp._util.stepwise import in_steps, run_within

__all__ = ["override"]


class override(contextlib.ContextDecorator):  # noqa: N801 (used like torch.no_grad)
    """Changes op policies on this thread inside a ``with`` block or a decorated function.

    Of a decorated generator, coroutine or async generator, each step runs in the block.

    ::

        with fastamp.autocast("cuda"), fastamp.policies.override({"layer_norm": "lower"}):
            loss = loss_fn(model(x), y)

    The changes win over :func:`fastamp.policies.set`'s and those of enclosing blocks, and act only
    inside autocast regions. ``torch.utils.checkpoint`` recomputes under the policies of its forward
    pass. While any thread is inside a block, compiled functions run eagerly, in all threads: their
    graphs hold the policies of the process (an edit by :func:`fastamp.policies.set` compiles new
    ones). Other threads are not affected, in particular those that run a backward pass on CUDA, nor
    are exported programs, which follow the policies of the process in which they run.

    An object may be entered again, nested, used by several threads, and left in another order than
    it was entered.

    Args:
        policies: Policy by op: names as for :func:`fastamp.policies.set`. Or the name of a
            preset, as for :func:`fastamp.policies.preset`.
        device: ``"cpu"``, ``"cuda"``, or both by default.

    Raises:
        TypeError: ``policies`` is neither a mapping nor a name.
        ValueError: On entering: an unknown op (the nearest names are given), policy or device, or
            a policy the op cannot carry. Nothing is changed then.
    """

    def __init__(self, policies: Mapping[str, str] | str, device: str | None = None) -> None:
        """Keeps the edits; they are checked when the block is entered."""
        if not isinstance(policies, (str, Mapping)):
            raise TypeError(
                "policies.override: expected policies to be a mapping or the name of a preset, got "
                f"{type(policies).__name__}"
            )
        self._preset = policies if isinstance(policies, str) else None
        self._edits = [] if isinstance(policies, str) else list(policies.items())
        self._device = device
        self._frames = threading.local()

    def __call__(self, func: Any) -> Any:
        """Decorates a function."""
        stepping = in_steps(func, run_within(self))
        return super().__call__(func) if stepping is None else stepping

    def __enter__(self) -> override:
        """Checks the edits and puts them in force."""
        block = _Block(self._checked())
        if not hasattr(self._frames, "stack"):
            self._frames.stack = []
        self._frames.stack.append(block)
        return self

    def _checked(self) -> Any:
        if self._preset is None:
            return _C.checked_op_policies([(self._device, self._edits)])
        return checked(preset_policies(self._preset, self._device))

    def __exit__(self, *exception: object) -> None:
        """Takes the edits back. Blocks may be left in any order.

        Raises:
            RuntimeError: This object is not entered on this thread. Nothing is changed.
        """
        stack: list[_Block] = getattr(self._frames, "stack", [])
        if not stack:
            raise RuntimeError(
                "policies.override.__exit__: expected a block that was entered on this thread and "
                "not left yet, got one that was not"
            )
        stack.pop().leave()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles carry the edits and no open block."""
        return override, (self._preset or dict(self._edits), self._device)


def checked(policies: Mapping[str, Mapping[str, str]]) -> Any:
    """Op policies by device, checked, for blocks and for :func:`run_under`.

    Raises:
        ValueError: As :class:`override` on entering.
    """
    return _C.checked_op_policies(
        [(device, list(edits.items())) for device, edits in policies.items()]
    )


#: Calls a function in a block of op policies that :func:`checked` has returned. To be looked up
#: here at each call.
run_under: Callable[..., Any] = _C.run_under_op_policies


def _keep_out_of_graphs() -> None:
    import torch._dynamo
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    global run_under
    native = run_under
    disable: Any = torch._dynamo.disable

    @disable(reason="fastamp: a module with op policies of its own runs eagerly")  # type: ignore[untyped-decorator]
    def run_eagerly(*given: Any) -> Any:
        return native(*given)

    def run(*given: Any) -> Any:
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            return run_eagerly(*given)
        return native(*given)

    run_under = run
    reason = "fastamp.policies.override changes what ops do on this thread: its block runs eagerly"
    for name in ("__init__", "__enter__", "__exit__"):
        method = disable(vars(override)[name], reason=reason)
        setattr(override, name, method)


compiler.when_dynamo_loads(_keep_out_of_graphs)


class _Block:
    """One entered block."""

    def __init__(self, overrides: Any) -> None:
        self._open = False
        carried_state.hold()
        self._open = True
        self._pushed = _C.push_op_policies(overrides, False)

    def leave(self) -> None:
        _C.pop_op_policies(self._pushed)
        self.__del__()

    def __del__(self) -> None:
        # Reached without leave() when a thread ends inside a block: its overrides end with it.
        if self._open:
            self._open = False
            carried_state.let_go()
