# SPDX-License-Identifier: Apache-2.0
"""clip_grad_norm_ of fastamp.torch, and torch's own while fastamp is installed."""

from __future__ import annotations

import pytest
import torch

import fastamp
import fastamp.torch as ft


def gradients() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.nn.Parameter(torch.zeros(n, 7)) for n in (1, 40, 3)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_the_mirrors_function_clips_as_torch_does_up_to_rounding(max_norm: float):
    torchs, own = gradients(), gradients()
    exact = torch.cat([p.grad.double().flatten() for p in own]).norm()
    expected = torch.nn.utils.clip_grad_norm_(torchs, max_norm)
    norm = ft.nn.utils.clip_grad_norm_(own, max_norm)
    assert norm.dtype == expected.dtype
    assert norm.item() == pytest.approx(exact.item(), rel=1e-7)
    for a, b in zip(own, torchs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_installing_leaves_torchs_bits():
    def clipped() -> list[torch.Tensor]:
        parameters = gradients()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        return [norm, *(p.grad for p in parameters)]

    expected = clipped()
    with fastamp.install():
        assert all(torch.equal(a, b) for a, b in zip(clipped(), expected, strict=True))
