# SPDX-License-Identifier: Apache-2.0
"""Nothing is copied to the CPU without waiting: it would be read before it has arrived."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastamp


class CopiesToTheHost(TorchDispatchMode):
    """Stands in for copies from a device that is not there, and notes whether they wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cpu":
                self.waited.append(not kwargs.get("non_blocking", False))
                dtype = kwargs.get("dtype") or args[0].dtype
                return torch.full(args[0].shape, 0.5, dtype=dtype, device="cpu")
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self.waited.append(not (len(args) > 2 and args[2]))
            return args[0].fill_(0.0)
        return func(*args, **kwargs)


def optimizer_with_gradients(kind: type) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 4.0)
    return kind([parameter], lr=1.0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, fastamp.optim.SGD, fastamp.optim.AdamW])
@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_", "clip_grad_value_", "step"])
def test_factors_and_flags_of_offloaded_gradients_are_waited_for(kind: type, call: str):
    optimizer = optimizer_with_gradients(kind)
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones((), device="meta"))
    with CopiesToTheHost() as copies:
        if call == "step" and kind is torch.optim.SGD:
            scaler.unscale_(optimizer)
        elif call.startswith("clip"):
            getattr(scaler, call)(optimizer, 1.0)
        else:
            getattr(scaler, call)(optimizer)
    assert copies.waited
    assert all(copies.waited)


def test_outputs_on_the_host_are_scaled_by_a_factor_that_is_waited_for():
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones((), device="meta"))
    with CopiesToTheHost() as copies:
        scaled = scaler.scale(torch.ones(2))
    assert copies.waited == [True]
    assert scaled.tolist() == [0.5, 0.5]
