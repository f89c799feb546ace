# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is written while steps run has the bits of the step it was asked for."""

from __future__ import annotations

import pytest

from support.async_save_cases import OPTIONS


@pytest.mark.parametrize("name", OPTIONS)
def test_async_save_stores_the_step_it_was_called_for(ranks, name):
    for rank in ranks:
        found = rank["async_save"][name]
        assert found["moved"]
        assert len(found["equal"]) > 10
        assert all(found["equal"])
