# SPDX-License-Identifier: Apache-2.0
"""Compiled code that sets autocast's state by hand, as libraries do that know no regions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

import fastamp
from support.autocast_state import torch_state

BF16, FP16 = torch.bfloat16, torch.float16
# Small integers: any order of summing the gradients of a weight is exact, and torch promises none.
W = torch.nn.Parameter(torch.arange(64.0).reshape(8, 8) % 5 - 2)
X = torch.arange(64.0).reshape(8, 8) % 7 - 3


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def switched_on(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Before, in and after what is a region by hand."""
    before = torch.mm(x, W)
    found = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", True)
    torch.autocast_increment_nesting()
    inside = torch.mm(x, W)
    torch.autocast_decrement_nesting()
    torch.set_autocast_enabled("cpu", found)
    return before, inside, torch.mm(x, W)


def without_kept_casts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with fastamp.autocast("cpu", dtype=BF16):
        torch.set_autocast_cache_enabled(False)
        inside = torch.mm(x, W)
        torch.set_autocast_cache_enabled(True)
        return inside, torch.mm(inside, W)


def in_another_dtype(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with fastamp.autocast("cpu", dtype=BF16):
        first = torch.mm(x, W)
        torch.set_autocast_dtype("cpu", FP16)
        other = torch.mm(x, W)
        torch.set_autocast_dtype("cpu", BF16)
        return first, other, torch.mm(x, W)


def gradients(function: Any) -> list[torch.Tensor]:
    W.grad = None
    out = function(X)
    sum(each.float().sum() for each in out).backward()
    return [*(each.detach() for each in out), W.grad]


# Not the dtype: where torch breaks the graph at its change, it goes on in the region as it began.
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [switched_on, without_kept_casts])
def test_compiled_code_has_eagers_bits_and_leaves_the_state_as_it_was(function: Any, backend: str):
    before = torch_state()
    expected = gradients(function)
    assert torch_state() == before
    compiled = torch.compile(function, backend=backend)
    for _ in range(2):  # traced, and run again
        found = gradients(compiled)
        assert torch_state() == before
        assert [each.dtype for each in found] == [each.dtype for each in expected]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("function", [switched_on, without_kept_casts, in_another_dtype])
def test_it_stays_in_one_graph_where_torch_traces_it(function: Any):
    before = torch_state()
    expected = gradients(function)
    try:
        found = gradients(torch.compile(function, backend="aot_eager", fullgraph=True))
    except torch._dynamo.exc.Unsupported:
        pytest.skip("this torch breaks the graph there: enabled is traced from 2.12, dtype 2.14")
    assert torch_state() == before
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
