# SPDX-License-Identifier: Apache-2.0
"""Casts per forward pass of known models: never more than torch's, none twice where kept."""

from __future__ import annotations

import pytest
import torch

import fastamp
from support.autocast_state import torch_kernels
from support.casts import copies_made
from support.counted_models import COUNTED


@pytest.mark.parametrize("name", COUNTED)
def test_never_more_casts_than_torch(name: str):
    torch.manual_seed(0)
    model, x = COUNTED[name]()

    def forward() -> None:
        with torch.autocast("cpu"):
            forward.out = model(x)

    with torch_kernels():
        casts_of_torch = copies_made(forward) - copies_made(lambda: model(x))
    with fastamp.debug.trace() as t:
        forward()
    own = t.totals["weight_casts"] + t.totals["other_casts"]
    assert 0 < own <= casts_of_torch
    if name == "BERT":  # query, key and value share the cast of their input
        assert t.totals["activation_hits"] >= 22
        assert own <= casts_of_torch - 22


@pytest.mark.parametrize("name", COUNTED)
def test_no_weight_is_cast_again_while_casts_are_kept(name: str):
    torch.manual_seed(0)
    model, x = COUNTED[name]()
    with fastamp.casts.keep(model):
        for step in range(3):
            with fastamp.debug.trace() as t, fastamp.autocast("cpu"):
                model(x).float().square().mean().backward()
            assert (t.totals["weight_casts"] == 0) == (step > 0)
