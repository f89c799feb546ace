# SPDX-License-Identifier: Apache-2.0
"""Parameters in a set: torch 2.15 warns of their order, and will refuse them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fastamp


def made(module: Any, name: str) -> tuple[Any, list[tuple[type[Warning], str]]]:
    """An optimizer of parameters in a set, or the error, and the warnings with it."""
    torch.manual_seed(0)
    params = {torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = getattr(module, name)(params, lr=0.1)
        except (TypeError, ValueError) as error:
            result = (type(error), str(error))
    return result, [(each.category, str(each.message)) for each in caught]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Muon"])
def test_a_set_is_taken_warned_of_or_refused_as_by_torch(name: str):
    expected, torchs_warnings = made(torch.optim, name)
    found, warned = made(fastamp.optim, name)
    assert warned == torchs_warnings
    if isinstance(expected, torch.optim.Optimizer):
        assert len(found.param_groups[0]["params"]) == 2
    else:
        assert found == expected
