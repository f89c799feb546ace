# SPDX-License-Identifier: Apache-2.0
"""The look at torch before and after a test."""

from types import SimpleNamespace

import pytest
import torch

from support.dropin_state import changed_objects, dropin_objects, use_cuda_once


def test_a_first_use_of_cuda_is_no_change(monkeypatch):
    def initialise():
        monkeypatch.setattr(torch.cuda, "_queued_calls", initialised)

    initialised = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", initialise)
    use_cuda_once(SimpleNamespace(get_closest_marker=lambda name: name == "cuda" or None))
    before = dropin_objects()
    torch.cuda.init()
    assert changed_objects(before, dropin_objects()) == []


def test_tests_without_cuda_initialise_nothing(monkeypatch, request):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("it was initialised"))
    use_cuda_once(request.node)
