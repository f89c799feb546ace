# SPDX-License-Identifier: Apache-2.0
"""Casts of parts of a tensor, with the largest magnitude of the whole: parts of its cast."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastamp._C as _C
from support.amp_reference import assert_same_bits
from support.float8 import E4M3, E5M2, dequantized


class Seen(TorchDispatchMode):
    """Makes the casts be done by torch's ops, as on CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def numbers(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 40, generator=generator)
    x = x * torch.arange(48).mul(-0.4).exp2()[:, None]
    x[3, 7], x[40, 2] = float("inf"), float("nan")
    return x.to(dtype)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Seen], ids=["kernels", "ops"])
@pytest.mark.parametrize("to", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parts_have_the_casts_of_the_whole(dtype, to, mode):
    x = numbers(dtype)
    finite = torch.where(x.isfinite(), x, 0).float().abs().max()
    with mode():
        amax = _C.float8_amax(x)
        assert amax.dtype == torch.float32
        assert amax.shape == ()
        parts = [_C.cast_part_to_float8(part, amax, to) for part in x.split([16, 30, 2])]
        alone, _ = _C.cast_part_to_float8(x[16:], _C.float8_amax(x[16:]), to)
    assert_same_bits(amax, finite)
    inverses = [float(inverse) for _, inverse in parts]
    assert inverses == [inverses[0]] * 3
    rows = torch.cat([rows for rows, _ in parts])
    assert rows.dtype == to
    known = x.isfinite()
    assert_same_bits((rows.float() * inverses[0])[known], dequantized(x, to)[known])
    assert rows.float()[3, 7].isnan() if to == E4M3 else rows.float()[3, 7].isinf()
    assert rows.float()[40, 2].isnan()
    assert not torch.equal(alone.view(torch.uint8), rows[16:].view(torch.uint8))


def test_the_largest_magnitude_of_nothing_is_0():
    for x in (torch.zeros(0, 16), torch.full((2, 2), float("nan")), torch.zeros(3)):
        assert float(_C.float8_amax(x)) == 0.0
