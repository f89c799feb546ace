# SPDX-License-Identifier: Apache-2.0
"""Compiled functions follow edits of the op policies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fastamp
import fastamp._C as _C

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def default_policies_after() -> Iterator[None]:
    yield
    fastamp.policies.reset()
    _C.unregister_kernels()
    _C.register_kernels()


def test_compiled_functions_see_edits_and_resets():
    w = torch.ones(4, 4)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w)

    def dtype() -> torch.dtype:
        with fastamp.autocast("cpu", dtype=BF16):
            return function(w).dtype

    tag = torch.compiler.config.cache_key_tag
    assert dtype() == BF16
    fastamp.policies.set("mm", "fp32", "cpu")
    first_edit = torch.compiler.config.cache_key_tag
    assert dtype() == FP32
    fastamp.policies.set("mm", "promote", "cpu")
    assert torch.compiler.config.cache_key_tag not in (tag, first_edit)
    fastamp.policies.reset()
    assert dtype() == BF16
    assert torch.compiler.config.cache_key_tag == tag


def test_a_cache_key_tag_of_the_users_own_survives_an_edit():
    torch.compiler.config.cache_key_tag = "mine"
    try:
        fastamp.policies.set("mm", "fp32", "cpu")
        assert "mine" in torch.compiler.config.cache_key_tag
        fastamp.policies.reset()
        assert torch.compiler.config.cache_key_tag == "mine"
    finally:
        torch.compiler.config.cache_key_tag = ""
