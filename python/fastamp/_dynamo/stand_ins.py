# SPDX-License-Identifier: Apache-2.0
"""Tensors with values for those without that compilers record calls with.

Kernels without values take many a mix of dtypes that the real ones refuse, and a record of a call
that is refused is of no use. So the policy "unify" tries a call with these first.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import fastamp._C as _C

#: The size that is taken for one of which nothing is known.
_SOME = 4


def _module(name: str) -> Any:
    """A module of torch's compilers, which record nothing before it is loaded; else None."""
    return sys.modules.get(name)


def _is_recording() -> bool:
    proxies = _module("torch.fx.experimental.proxy_tensor")
    return (
        torch._guards.TracingContext.try_get() is not None
        or torch.compiler.is_compiling()
        or (proxies is not None and proxies.get_proxy_mode() is not None)
    )


def _number(size: Any) -> int:
    """A size; of a symbol the one for which code is being compiled."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return _SOME if hint is None else int(hint)


def _is_a(tensor: torch.Tensor, module: str, name: str) -> bool:
    return _module(module) is not None and isinstance(tensor, getattr(_module(module), name))


def _stand_in(tensor: Any) -> torch.Tensor | None:
    """A tensor to try a call with before it is recorded; None if nothing can be tried."""
    is_fake = _is_a(tensor, "torch._subclasses.fake_tensor", "FakeTensor")
    is_wrapped = _is_a(tensor, "torch._subclasses.functional_tensor", "FunctionalTensor")
    if not (is_wrapped or _is_recording()):
        return None
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            copied: torch.Tensor = tensor.detach().clone()
            return copied
        if not (is_fake or is_wrapped) or tensor.layout != torch.strided or tensor.is_nested:
            return None
        sizes, strides = (tuple(map(_number, each)) for each in (tensor.size(), tensor.stride()))
        device = tensor.fake_device if is_fake else tensor.device
        try:
            made: torch.Tensor = torch.empty_strided(
                sizes, strides, dtype=tensor.dtype, device=device
            )
        except (RuntimeError, AssertionError):  # There is no such device, or not enough memory.
            return None
        return made.zero_()


_C.set_stand_in_maker(_stand_in)
