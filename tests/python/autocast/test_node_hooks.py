# SPDX-License-Identifier: Apache-2.0
"""Hooks on the creation of autograd nodes see casts: torch 2.14 and later."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastamp
from support.autocast_state import torch_kernels

hook_class: Any = getattr(torch.autograd.graph, "node_creation_hook", None)
pytestmark = pytest.mark.skipif(
    hook_class is None, reason="torch.autograd.graph.node_creation_hook is from torch 2.14 on"
)


def created(region: Any) -> list[str]:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    names: list[str] = []
    with region("cpu"), hook_class(lambda node: names.append(node.name())):
        layers(torch.ones(2, 8, requires_grad=True)).sum().backward()
    return names


def test_nodes_of_casts_are_announced_as_torchs():
    own = created(fastamp.autocast)
    with torch_kernels():
        torchs = created(torch.autocast)
    assert "ToCopyBackward0" in torchs
    assert sorted(own) == sorted(torchs)
