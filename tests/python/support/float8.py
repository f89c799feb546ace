# SPDX-License-Identifier: Apache-2.0
"""Products in fp8 as torch's own ops compute them, from the definition in docs/float8.md."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import fastamp

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAX = {E4M3: 448.0, E5M2: 57344.0}


def float8_region(device: str = "cpu", **kwargs: Any) -> fastamp.autocast:
    """A region with the default recipe, without the warning that it is slow on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return fastamp.autocast(device, **{"float8": True, **kwargs})


def dequantized(x: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """What a cast of ``x`` to fp8 stands for, as float32."""
    x = x.detach().float()
    amax = float(torch.where(x.isfinite(), x.abs(), 0.0).max())
    exponent = 0
    if amax > 0:
        exponent = 126
        while amax * 2.0**exponent > MAX[dtype]:
            exponent -= 1
    cast: torch.Tensor = (x.double() * 2.0**exponent).float().to(dtype).float()
    return (cast.double() * 2.0**-exponent).float()


def outcomes(function: Callable[[], Any]) -> list[str]:
    """What the trace says of fp8 in each row."""
    with fastamp.debug.trace() as trace:
        function()
    return sorted({row.float8 for row in trace.rows})


def saved_bytes(function: Callable[[], Any], params: list[torch.Tensor]) -> dict[torch.dtype, int]:
    """Bytes saved for backward by dtype, each storage once, parameters not."""
    known = {param.untyped_storage().data_ptr() for param in params}
    found: dict[int, tuple[torch.dtype, int]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = (tensor.dtype, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()
    sums: dict[torch.dtype, int] = {}
    for dtype, size in found.values():
        sums[dtype] = sums.get(dtype, 0) + size
    del output
    return sums
