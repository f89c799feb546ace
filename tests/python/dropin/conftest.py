from __future__ import annotations

from collections.abc import Iterator

import pytest

import fastamp
from support.dropin_state import changed_objects, dropin_objects


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was() -> Iterator[None]:
    before = dropin_objects()
    yield
    fastamp.uninstall()
    assert changed_objects(before, dropin_objects()) == []


@pytest.fixture
def installed() -> Iterator[None]:
    with fastamp.install():
        yield
