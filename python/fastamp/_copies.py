# SPDX-License-Identifier: Apache-2.0
"""Copies between devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor itself if it is on the device, else a copy that is.

    Copies do not wait for the device, except those to the CPU: asked not to, torch returns memory
    that the device has yet to write.
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device=device, non_blocking=device.type != "cpu")
