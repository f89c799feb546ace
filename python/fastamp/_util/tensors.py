# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors between devices, and tensors that outlive the caller's modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["on_device", "ordinary_tensors"]

_FUNCTIONALIZATION = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Lets tensors be made that can still be written when the caller's modes have ended.

    An inference tensor can be written only in inference mode, and functionalization wraps tensors
    that are made under it.
    """
    with torch.inference_mode(False), torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZATION):
        yield


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor itself if it is on the device, else a copy that is.

    Copies do not wait for the device, except those to the CPU: asked not to, torch returns memory
    that the device has yet to write.
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device=device, non_blocking=device.type != "cpu")
