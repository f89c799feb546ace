# SPDX-License-Identifier: Apache-2.0
"""Outputs that a gradient scaler is given to scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastamp._util.scaled_backward import scaled


def scale_each(
    outputs: Any,
    scale_on: Callable[[torch.device], torch.Tensor],
    replicas: dict[torch.device, torch.Tensor],
) -> Any:
    """Scales the tensors of a nest of iterables; the scale goes to each device once.

    Args:
        outputs: A tensor, or an iterable of such, nested at will.
        scale_on: Returns the scale on a device.
        replicas: Those that were returned so far.

    Returns:
        As :meth:`fastamp.GradScaler.scale`.

    Raises:
        ValueError: An element is neither a tensor nor an iterable.
    """
    if isinstance(outputs, torch.Tensor):
        device = outputs.device
        if device not in replicas:
            replicas[device] = scale_on(device)
        return scaled(outputs, replicas[device])
    if not isinstance(outputs, Iterable):
        raise ValueError(
            "scale: outputs must be a Tensor or an iterable of Tensors, "
            f"got {type(outputs).__name__}"
        )
    products = (scale_each(output, scale_on, replicas) for output in outputs)
    return type(outputs)(products) if isinstance(outputs, (list, tuple)) else products
