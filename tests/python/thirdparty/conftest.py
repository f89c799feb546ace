# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastamp
from support.dropin_state import changed_objects, dropin_objects, use_cuda_once


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    use_cuda_once(request.node)
    importlib.import_module("torch._dynamo")  # wraps some of torch's functions on import
    before = dropin_objects()
    yield
    fastamp.uninstall()
    assert changed_objects(before, dropin_objects()) == []


@pytest.fixture(autouse=True)
def nothing_is_fetched_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # libraries write logs and checkpoints where they run
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
