# SPDX-License-Identifier: Apache-2.0
"""Two groups of gloo processes, of two and four, run the cases of all tests in this folder once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support import rank_cases
from support.ranks import results_of_ranks


@pytest.fixture(scope="session", params=[2, 4], ids="{}-ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[list[Any]]:
    """What each rank has to report."""
    yield from results_of_ranks(rank_cases.run, tmp_path_factory, request.param)
