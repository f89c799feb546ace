# SPDX-License-Identifier: Apache-2.0
"""torch.utils.checkpoint.checkpoint as a decorator: torch 2.14 and later."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastamp
from support.float8 import float8_region

IS_DECORATOR = inspect.signature(checkpoint).parameters["function"].default is None
pytestmark = pytest.mark.skipif(
    not IS_DECORATOR, reason="checkpoint of this torch is no decorator: it is from 2.14 on"
)


class Block(nn.Module):
    """A method that is checkpointed, and what was in force at each of its runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(32, 32)
        self.seen: list[Any] = []

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        self.seen.append((out.dtype, fastamp.float8.recipe("cpu")))
        return torch.nn.functional.gelu(out)


def decorated(reentrant: bool) -> type[Block]:
    class Decorated(Block):
        forward = checkpoint(use_reentrant=reentrant)(Block.plain)

    return Decorated


class Plain(Block):
    forward = Block.plain


def gradients(kind: type[Block], block: Any, *, inside: bool) -> tuple[list[torch.Tensor], Any]:
    model = kind()
    x = torch.linspace(-1, 1, 16 * 32).reshape(16, 32).requires_grad_()
    with block():
        y = model(x).float().square().sum()
        if inside:
            y.backward()
    if not inside:
        y.backward()
    return [x.grad, *(param.grad for param in model.parameters())], model.seen


@contextmanager
def with_a_policy() -> Iterator[None]:
    with fastamp.autocast("cpu"), fastamp.policies.override({"linear": "fp32"}):
        yield


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("block", [float8_region, with_a_policy])
def test_recipes_and_policies_go_with_it(block: Any, inside: bool, reentrant: bool):
    expected, first = gradients(Plain, block, inside=inside)
    found, seen = gradients(decorated(reentrant), block, inside=inside)
    assert seen == first * 2
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
