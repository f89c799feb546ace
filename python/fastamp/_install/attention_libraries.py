# SPDX-License-Identifier: Apache-2.0
"""Attention of other libraries: calls that they refuse in regions, because of a norm in float32.

A policy of the op below would not do. Those ops are called in ``forward`` of a
``torch.autograd.Function``, which saves what it was given for its backward pass: with a cast in the
op, the backward kernel would refuse the float32 tensors instead. Other arguments of the op, such as
slopes of a bias, have to stay float32. And some libraries compare dtypes before they call any op.
So the arguments are cast where the call enters the library, by casts that autograd sees.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import fastamp._C as _C
from fastamp._dynamo import compiler
from fastamp._util.patches import Patches

__all__ = ["CALLS", "LibraryCall", "follow", "state_of", "unfollow"]

_LOW = frozenset({torch.float16, torch.bfloat16})
_CAST = _LOW | {torch.float32}
_DEVICES = ("cuda", "cpu")


class LibraryCall(NamedTuple):
    """A class by which calls enter a library: its ``apply``, or its constructor.

    A call is refused by the library, and only then changed here, if the named arguments that are
    tensors have several dtypes, or one that is not accepted. Then they are cast to the dtype of the
    region. A call that the library takes is left alone: its results are those without fastamp. So
    are calls of functions in compiled code: dynamo does not look at ``apply``.
    """

    module: str
    name: str
    tensors: tuple[str, ...]  #: The first arguments of the call.
    accepted: frozenset[torch.dtype]
    ops: tuple[str, ...]  #: Whose policy or autocast kernel, if there is one, counts instead.
    source: str  #: Where others report that the call fails in regions.

    @property
    def path(self) -> str:
        """The name that Python code imports."""
        return f"{self.module}.{self.name}"


_DIFFUSERS = "https://github.com/huggingface/diffusers/issues/14104"
_XFORMERS = "https://github.com/facebookresearch/xformers/issues/1046"


def _flash_attention(
    module: str, prefix: str, ops: Sequence[str], names: Mapping[str, tuple[str, ...]]
) -> Iterable[LibraryCall]:
    for name, tensors in names.items():
        varlen = "Varlen" in name and len(ops) > 1
        op = ops[1:] if varlen else ops[:1]
        below = tuple(f"{prefix}::{each}" for each in op)
        yield LibraryCall(module, name, tensors, _LOW, below, _DIFFUSERS)


_QKV = ("q", "k", "v")
_UNPACKED: dict[str, tuple[str, ...]] = {"FlashAttnFunc": _QKV, "FlashAttnVarlenFunc": _QKV}
_PACKED: dict[str, tuple[str, ...]] = {"FlashAttnQKVPackedFunc": ("qkv",)}
_INPUTS = ("query", "key", "value", "attn_bias")

#: Read in flash-attention 0251105 (2026-08), xformers v0.0.23 to v0.0.35 and MSLK 2a3c897. FA3's
#: module has been installed under both names. xformers takes its attention from MSLK since 2026-04.
CALLS: tuple[LibraryCall, ...] = (
    *_flash_attention(
        "flash_attn.flash_attn_interface",
        "flash_attn",
        ("_flash_attn_forward", "_flash_attn_varlen_forward"),
        _UNPACKED
        | _PACKED
        | {"FlashAttnVarlenQKVPackedFunc": ("qkv",)}
        | dict.fromkeys(("FlashAttnKVPackedFunc", "FlashAttnVarlenKVPackedFunc"), ("q", "kv")),
    ),
    *(
        call
        for module in ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
        for call in _flash_attention(
            module, "flash_attn_3", ("_flash_attn_forward",), _UNPACKED | _PACKED
        )
    ),
    *_flash_attention("flash_attn.cute.interface", "", (), _UNPACKED),
    *(
        LibraryCall(module, "Inputs", _INPUTS, _CAST, ops, _XFORMERS)
        for module, ops in (
            (
                "xformers.ops.fmha.common",
                (
                    "xformers::efficient_attention_forward_cutlass",
                    "xformers_flash::flash_fwd",
                    "xformers_flash3::flash_fwd",
                ),
            ),
            ("mslk.attention.fmha.common", ()),
        )
    ),
)


class _Wrapped(NamedTuple):
    """Change that was made for a call, or why none was."""

    patches: Patches
    problem: str


_following = False
_wrapped: dict[LibraryCall, _Wrapped] = {}


def follow() -> None:
    """Has calls cast their arguments from now on; of libraries not imported yet, once they are."""
    global _following
    if _following:
        return
    _following = True
    for call in CALLS:
        compiler.when_loaded(call.module, _WRAP[call])


def unfollow() -> None:
    """Undoes :func:`follow`.

    A class that other code has changed since keeps a call that casts nothing.
    """
    global _following
    _following = False
    for call in CALLS:
        compiler.no_longer_when_loaded(call.module, _WRAP[call])
    for wrapped in _wrapped.values():
        if not wrapped.patches.overwritten():
            wrapped.patches.undo()
    _wrapped.clear()


def state_of(call: LibraryCall) -> str:
    """Describes what becomes of a call now, in words for a list."""
    if call in _wrapped:
        return _wrapped[call].problem or _own_policy(call) or "in force"
    return "once it is imported" if _following else "off: fastamp's kernels are not registered"


def _wrap(call: LibraryCall) -> None:
    cls = getattr(sys.modules[call.module], call.name, None)
    patches = Patches()
    _wrapped[call] = _Wrapped(patches, _problem(call, cls))
    if _wrapped[call].problem:
        return
    if issubclass(cls, torch.autograd.Function):  # type: ignore[arg-type]
        patches.replace(cls, "apply", classmethod(_casting_apply(call, cls)))  # type: ignore[arg-type]
    else:
        patches.replace(cls, "__init__", _casting_init(call, cls.__init__))  # type: ignore[arg-type,misc]


_WRAP: dict[LibraryCall, Callable[[], None]] = {
    call: functools.partial(_wrap, call) for call in CALLS
}


def _problem(call: LibraryCall, cls: Any) -> str:
    if not isinstance(cls, type):
        return "left alone: this version has no such class"
    if cls.__module__ != call.module:  # which has a line of its own
        return f"as {cls.__module__}.{call.name}"
    is_function = issubclass(cls, torch.autograd.Function)
    method = getattr(cls, "forward" if is_function else "__init__")
    names = tuple(inspect.signature(method).parameters)[1:]  # without ctx, self
    if names[: len(call.tensors)] != call.tensors:
        return "left alone: this version has other arguments"
    return ""


def _casting_apply(call: LibraryCall, owner: Any) -> Callable[..., Any]:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        count = len(call.tensors)
        return super(owner, cls).apply(*_cast(call, args[:count]), *args[count:], **kwargs)

    return apply


def _casting_init(call: LibraryCall, wrapped: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(wrapped)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        names = [name for name in call.tensors[len(args) :] if name in kwargs]
        count = min(len(args), len(call.tensors))
        values = _cast(call, (*args[:count], *(kwargs[name] for name in names)))
        kwargs.update(zip(names, values[count:], strict=True))
        wrapped(self, *values[:count], *args[count:], **kwargs)

    return __init__


def _cast(call: LibraryCall, values: Sequence[Any]) -> Sequence[Any]:
    """The values, those that are tensors in the region's dtype if the library would refuse them."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    dtypes = {tensor.dtype for tensor in tensors}
    if (
        not dtypes
        or (len(dtypes) == 1 and dtypes <= call.accepted)
        or not dtypes <= _CAST
        or not _following
    ):
        return values
    device = tensors[0].device.type
    if device not in _DEVICES or not torch.is_autocast_enabled(device):
        return values
    lower = torch.get_autocast_dtype(device)
    if lower not in _LOW or not _counts(CALLS.index(call)):
        return values
    cast: list[Any] = []
    for i, value in enumerate(values):
        for j in range(i):
            if values[j] is value:  # a library may ask whether key and value are the same
                cast.append(cast[j])
                break
        else:
            cast.append(value.to(lower) if isinstance(value, torch.Tensor) else value)
    return cast


def _counts(number: int) -> bool:
    """Whether a call of the table is to be changed. A constant in compiled functions."""
    return _C.kernels_registered() and not _own_policy(CALLS[number])


compiler.when_dynamo_loads(lambda: compiler.trace_as_constant(_counts))


def _own_policy(call: LibraryCall) -> str:
    """Returns who gave one of the ops below a policy; empty if nobody did."""
    for op in call.ops:
        for device in _DEVICES:
            try:
                policy = _C.op_policy(op, device)
            except ValueError:
                break
            return f"left to policies.register_op: {op} is {policy}"
        if not torch._C._dispatch_has_kernel(op):
            continue
        for key in ("AutocastCPU", "AutocastCUDA"):
            if torch._C._dispatch_has_kernel_for_dispatch_key(op, key):
                return f"left to the autocast kernel of {op}"
    return ""
