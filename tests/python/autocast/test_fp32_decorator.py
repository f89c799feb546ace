# SPDX-License-Identifier: Apache-2.0
"""@fastamp.policies.fp32: functions and classes that run in float32 inside regions."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastamp

BF16, FP32 = torch.bfloat16, torch.float32


@fastamp.policies.fp32
def product(x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:
    """Multiplies."""
    return x @ y


@fastamp.policies.fp32
class Norm(nn.Module):
    """RMSNorm, which overflows in float16 above 255."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def test_a_function_runs_in_float32_in_regions_only():
    low, square = torch.ones(2, 2, dtype=BF16), torch.ones(2, 2)
    with fastamp.autocast("cpu", dtype=BF16):
        assert product(low, y=square).dtype == FP32
        assert (square @ square).dtype == BF16
    assert product(low, y=low).dtype == BF16
    assert product.__name__ == "product"
    assert product.__doc__ == "Multiplies."
    assert list(inspect.signature(product).parameters) == ["x", "y"]


def test_a_class_stays_itself_and_its_instances_run_in_float32():
    large = torch.full((1, 4), 1000.0, dtype=torch.float16)
    module = Norm()
    assert not bool(module(large).isfinite().all() and module(large).ne(0).all())
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with fastamp.autocast("cpu", dtype=torch.float16):
            out = each(large)
        assert out.dtype == FP32
        torch.testing.assert_close(out, torch.ones(1, 4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_the_same(reentrant: bool):
    module = Norm()
    x = torch.randn(3, 4, requires_grad=True)
    with fastamp.autocast("cpu", dtype=BF16):
        expected = module(x)
        out = checkpoint(module, x, use_reentrant=reentrant)
    (mine,) = torch.autograd.grad(expected.square().sum(), x)
    out.square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, mine)


def test_an_exception_and_a_region_within():
    @fastamp.policies.fp32
    def fail(x: torch.Tensor) -> None:
        assert not torch.is_autocast_enabled("cpu")
        with fastamp.autocast("cpu", dtype=torch.float16):
            assert (x @ x).dtype == torch.float16
        raise KeyboardInterrupt

    with fastamp.autocast("cpu", dtype=BF16):
        with pytest.raises(KeyboardInterrupt):
            fail(torch.ones(2, 2))
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("decorated", "text"),
    [
        (int, "the class int"),
        (torch.autograd.Function, "the class Function"),
        (nn.Linear(2, 2), "policies.for_modules"),
        (3, "type int"),
    ],
)
def test_other_things_are_refused(decorated: Any, text: str):
    with pytest.raises(TypeError, match=f"policies.fp32: expected .*{text}"):
        fastamp.policies.fp32(decorated)
