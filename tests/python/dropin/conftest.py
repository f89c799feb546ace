# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

import fastamp
import fastamp._C as _C
from support.dropin_state import (
    changed_objects,
    dispatch_state,
    dropin_objects,
    use_cuda_once,
)


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    use_cuda_once(request.node)
    before, threads_before = dropin_objects(), dispatch_state()
    yield
    fastamp.uninstall()
    assert changed_objects(before, dropin_objects()) == []
    assert dispatch_state() == threads_before
    assert _C.open_torch_regions() == 0


@pytest.fixture
def installed() -> Iterator[None]:
    with fastamp.install():
        yield
