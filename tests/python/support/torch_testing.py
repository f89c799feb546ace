# SPDX-License-Identifier: Apache-2.0
"""Modules of torch's own tests, of which most import expecttest: not every machine has it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


def torch_testing(name: str) -> Any:
    """Returns ``torch.testing._internal.<name>``.

    Without expecttest it skips the test, or the file whose import calls it; pytest names that file.
    """
    __tracebackhide__ = True
    pytest.importorskip("expecttest", reason="torch's tests: expecttest is not installed")
    return importlib.import_module(f"torch.testing._internal.{name}")
