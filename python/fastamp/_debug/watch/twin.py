# SPDX-License-Identifier: Apache-2.0
"""An fp32 twin of what runs: each op again, on the values that fp32 would have had."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fastamp._debug.watch.modules import is_readable
from fastamp._debug.watch.op_calls import OpCall

__all__ = ["Fp32Twin"]

_HALF = (torch.float16, torch.bfloat16)
_WIDENED = (*_HALF, torch.float32)
_Key = tuple[int, Any, tuple[int, ...], tuple[int, ...], torch.dtype]


def _is_widened(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _WIDENED and is_readable(value)


class Fp32Twin:
    """Carries fp32 values beside the tensors of a step, forward and backward.

    A value is known again by the memory, place and dtype of its tensor, so that what autograd saved
    is found as well; memory that was seen is kept until the twin ends, and so is the value. Random
    ops, ops of other libraries and those that have no fp32 kernel begin anew from the values that
    the step has. What writes memory through another view than the one that is known does the same.
    """

    def __init__(self) -> None:
        """Knows no tensor."""
        self._values: dict[_Key, torch.Tensor] = {}
        self._keys: dict[int, set[_Key]] = {}
        self._memory: dict[int, Any] = {}

    def before(self, call: OpCall) -> tuple[Any, Any]:
        """Runs the twin of a call that is about to run.

        Returns:
            What fp32 makes of the same arguments, and what it makes of those that fp32 would have
            had; None where there is no fp32 of the op, or the call has nothing to do with 16 bits.
        """
        if not self._has_twin(call):
            return None, None
        with torch._C._DisableAutocast(), torch.no_grad():
            writes = self._writes(call)
            own = self._arguments(call, known=True, copied=writes)
            same = self._arguments(call, known=False, copied=writes)
            is_low = any(t.dtype in _HALF for t in call.tensors)
            try:
                on_twin = self._call(call, own)
                on_same = self._call(call, same) if is_low and not call.is_view else None
            except Exception:  # No kernel for fp32, or one that wants other arguments; or bad ones.
                return None, None
        return on_same, on_twin

    def after(self, call: OpCall, result: Any, twins: tuple[Any, Any]) -> tuple[Any, Any]:
        """Notes the result of a call.

        Args:
            call: What has run.
            result: What it has returned.
            twins: What :meth:`before` has.

        Returns:
            ``twins``.
        """
        self._forget_written(call)
        if twins[1] is not None:
            self._note(result, twins[1])
        return twins

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns what fp32 would have in place of a tensor; None if that is not known."""
        return self._values.get(_key(tensor)) if _is_widened(tensor) else None

    def _has_twin(self, call: OpCall) -> bool:
        if call.func.namespace != "aten" or not call.tensors:
            return False
        is_random = torch.Tag.nondeterministic_seeded in call.func.tags
        return not is_random and all(map(is_readable, call.tensors))

    @staticmethod
    def _writes(call: OpCall) -> bool:
        return bool(call.func._schema.is_mutable)

    def _arguments(self, call: OpCall, known: bool, copied: bool) -> tuple[Any, Any]:
        """The arguments in fp32; copies of them if the op writes, of what the twin does not own."""
        owned: dict[int, torch.Tensor] = {}

        def widen(leaf: Any) -> Any:
            if isinstance(leaf, torch.dtype):
                return torch.float32 if leaf in _HALF else leaf
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in owned:
                value = self._values.get(_key(leaf)) if known and _is_widened(leaf) else None
                if value is None or _shares(value, leaf):
                    value = leaf.detach().float() if _is_widened(leaf) else leaf.detach()
                    value = value.clone() if copied else value
                owned[id(leaf)] = value
            return owned[id(leaf)]

        args, kwargs = tree_map(widen, (call.args, call.kwargs))
        return args, kwargs

    @staticmethod
    def _call(call: OpCall, arguments: tuple[Any, Any]) -> Any:
        args, kwargs = arguments
        if call.op in ("_softmax", "_log_softmax"):
            args = (*args[:2], False)  # half_to_float is for 16-bit arguments.
        return call.func(*args, **kwargs)

    def _forget_written(self, call: OpCall) -> None:
        if not self._writes(call):
            return
        for tensor in call.tensors:
            if _is_widened(tensor):
                for key in self._keys.pop(_memory(tensor), set()):
                    self._values.pop(key, None)

    def _note(self, result: Any, twins: Any) -> None:
        for tensor, value in zip(tree_leaves(result), tree_leaves(twins), strict=False):
            if not _is_widened(tensor) or not isinstance(value, torch.Tensor):
                continue
            if value.shape != tensor.shape:
                continue
            memory, key = _memory(tensor), _key(tensor)
            self._memory[memory] = tensor.untyped_storage()
            self._values[key] = value
            self._keys.setdefault(memory, set()).add(key)


def _memory(tensor: torch.Tensor) -> int:
    cdata: int = tensor.untyped_storage()._cdata
    return cdata


def _key(tensor: torch.Tensor) -> _Key:
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return _memory(tensor), tensor.storage_offset(), shape, strides, tensor.dtype


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
