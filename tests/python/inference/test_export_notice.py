# SPDX-License-Identifier: Apache-2.0
"""A region around torch.export.export is lost, and noticed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
from fastamp._inference import export_notice

BF16 = torch.bfloat16
X = torch.ones(2, 8)


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(export_notice, "_has_warned", False)


def noticed(function: Any) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [w for w in caught if "torch.export.export does not record" in str(w.message)]


@pytest.mark.parametrize("region", [fastamp.autocast, torch.autocast])
def test_it_is_noticed_once_with_the_line_that_works(region: Any):
    model = nn.Linear(8, 8).eval()

    def export() -> None:
        with region("cpu", dtype=BF16):
            torch.export.export(model, (X,))
            torch.export.export(model, (X,))

    (warning,) = noticed(export)
    assert "fastamp.inference.export(model, args, torch.bfloat16, lists='cpu')" in str(
        warning.message
    )
    assert warning.filename == __file__
    # The line does what it says.
    done = fastamp.inference.export(model, (X,), torch.bfloat16, lists="cpu", verbose=False)
    assert done.types.checked == {"lower": 1}


def test_outside_of_regions_and_where_they_count_nothing_is_said():
    model = nn.Linear(8, 8).eval()
    assert not noticed(lambda: torch.export.export(model, (X,)))
    assert not noticed(lambda: fastamp.inference.export(model, (X,), BF16, verbose=False))

    def off() -> None:
        with fastamp.autocast("cpu", enabled=False):
            torch.export.export(model, (X,))

    assert not noticed(off)

    def fp8() -> None:
        with fastamp.autocast("cpu", float8=True):
            torch.export.export(model, (X,)).run_decompositions()

    assert not noticed(fp8)


def test_the_onnx_exporter_keeps_the_region():
    pytest.importorskip("onnxscript")

    def onnx() -> None:
        with fastamp.autocast("cpu", dtype=torch.float16):
            torch.onnx.export(nn.Linear(8, 8), (X,), dynamo=True, verbose=False)

    assert not noticed(onnx)
