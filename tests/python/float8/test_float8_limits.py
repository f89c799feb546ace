# SPDX-License-Identifier: Apache-2.0
"""Where fp8 regions do not go, as docs/float8.md says: DTensors, compiled second derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import fastamp
from support.float8 import float8_region, outcomes

linear = nn.functional.linear


@pytest.fixture
def mesh() -> Iterator[Any]:
    if dist.is_initialized():
        pytest.skip("another test has left a process group")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_other_dtensors_run_in_the_base_dtype_with_its_bits_and_the_trace_says_so(mesh: Any):
    torch.manual_seed(0)
    weight, x = torch.randn(32, 64), torch.randn(16, 64)
    shard = distribute_tensor(weight.clone(), mesh, [Shard(0)]).requires_grad_()
    rows = distribute_tensor(x, mesh, [Shard(0)])  # Whose parts make no parts of the product.
    found = []

    def run() -> None:
        with float8_region():
            found.append(linear(rows, shard))

    assert outcomes(run) == ["tensor kind, mode or transform"]
    plain = weight.clone().requires_grad_()
    with fastamp.autocast("cpu", dtype=torch.bfloat16):
        expected = linear(x, plain)
    assert torch.equal(found[0].full_tensor(), expected)
    found[0].float().square().sum().backward()
    expected.float().square().sum().backward()
    assert torch.equal(shard.grad.full_tensor(), plain.grad)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_gradient_is_differentiated_with_fp8_as_without():
    def refusal(region: Any) -> tuple[bool, str]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer, x = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
        compiled = torch.compile(
            lambda x: layer(x).float().square().sum(), backend="aot_eager", fullgraph=True
        )
        with region:
            loss = compiled(x)
        (gradient,) = torch.autograd.grad(loss, [x], create_graph=True)
        with pytest.raises(RuntimeError) as error:
            gradient.sum().backward()
        return gradient.requires_grad, str(error.value)

    # torch 2.11: without a history, and "does not require grad"; 2.15: with one that refuses.
    has_history, why = refusal(torch.autocast("cpu", dtype=torch.bfloat16))
    expected = "not currently support double backward" if has_history else "does not require grad"
    assert expected in why
    assert refusal(float8_region()) == (has_history, why)
