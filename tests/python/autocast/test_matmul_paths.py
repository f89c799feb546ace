# SPDX-License-Identifier: Apache-2.0
"""matmul chooses its kernel by the operands' requires_grad: in regions it chooses as torch's does.

Kernels may round differently, so another choice would be other bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch.nn.functional import linear
from torch.profiler import profile

import fastamp
from support.autocast_state import TORCH_LOSES_GRADIENTS

BF16 = torch.bfloat16
MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}

# Where a torch that keeps casts without a history uses one: which gradients choose the kernel.
LOST = {("no_grad", False), ("inference", False), ("inference", True)}


def products(
    mode: type[AbstractContextManager[object]], *, trained: bool, before: bool, cache: bool
) -> list[str]:
    """The kernels of a linear layer whose input is three-dimensional and strided."""
    x = torch.randn(2, 5, 16).transpose(0, 1)
    weight, bias = (torch.randn(*s, requires_grad=trained) for s in ((48, 16), (48,)))
    region = torch.autocast("cpu", dtype=BF16, cache_enabled=cache)
    with profile(acc_events=True) as events, region:
        if before:
            linear(x, weight, bias)
        with mode():
            linear(x, weight, bias)
            linear(x, weight, bias)
        linear(x, weight, bias)
    return [e.name for e in events.events() if e.name in ("aten::mm", "aten::bmm", "aten::addmm")]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_kernels_are_torchs(mode: str, trained: bool, before: bool, cache: bool) -> None:
    if TORCH_LOSES_GRADIENTS and trained and cache and (mode, before) in LOST:
        pytest.skip("this torch loses the weight's gradient, and so takes another kernel")
    options = {"trained": trained, "before": before, "cache": cache}
    with fastamp.debug.torch_kernels():
        expected = products(MODES[mode], **options)
    assert len(expected) == 3 + before
    assert products(MODES[mode], **options) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["kept", "together"])
def test_kept_and_joint_casts_change_no_kernel(way: str, mode: str) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    x = torch.randn(2, 5, 16).transpose(0, 1)

    def run() -> list[str]:
        with profile(acc_events=True) as events:
            for _ in range(2):
                with torch.autocast("cpu", dtype=BF16), MODES[mode]():
                    layers(x)
        names = ("aten::mm", "aten::bmm", "aten::addmm")
        return [e.name for e in events.events() if e.name in names]

    with fastamp.debug.torch_kernels():
        expected = run()
    handle = fastamp.casts.keep(layers) if way == "kept" else fastamp.casts.together(layers)
    try:
        assert run() == expected
    finally:
        handle.release()
