# SPDX-License-Identifier: Apache-2.0
"""fastamp.debug.plot_history: the drawing shows what GradScaler.history shows."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastamp


def trained(steps: str, *, zero_gradients: bool = False, **options: Any) -> fastamp.GradScaler:
    """A scaler after some iterations, of which those with an x overflowed."""
    options = {"init_scale": 1024.0, "growth_interval": 2, **options}
    scaler = fastamp.GradScaler("cpu", **options)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    factor = 0.0 if zero_gradients else 2.0
    for step in steps:
        optimizer.zero_grad()
        scaler.scale((weight * (math.inf if step == "x" else factor)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler


def test_scale_skips_and_norms_are_those_of_the_history(tmp_path: Path):
    pytest.importorskip("matplotlib")
    scaler = trained("..x..x..")
    history = scaler.history()
    path = tmp_path / "history.png"
    figure = fastamp.debug.plot_history(scaler, path)
    assert path.stat().st_size > 1000
    scale, norm = figure.axes
    steps, values = scale.lines[0].get_data()
    assert list(steps) == list(range(8))
    assert list(values) == [row.scale for row in history]
    assert set(values) == {1024.0, 2048.0}
    assert list(scale.lines[1].get_xdata()) == [2, 5]
    assert list(scale.lines[1].get_ydata()) == [history[2].scale, history[5].scale]
    finite = [row for row in history if math.isfinite(row.norm)]
    assert list(norm.lines[0].get_xdata()) == [row.step for row in finite] == [0, 1, 3, 4, 6, 7]
    assert list(norm.lines[0].get_ydata()) == [row.norm for row in finite]
    assert [text.get_text() for text in scale.get_legend().texts] == ["scale", "skipped (2 of 8)"]
    assert [axes.get_yscale() for axes in (scale, norm)] == ["log", "log"]
    assert scale.yaxis.get_transform().base == 2  # A change of the scale is a step on its grid.
    assert list(norm.get_xticks()) == [round(tick) for tick in norm.get_xticks()]
    assert norm.get_xlabel() == "iteration"


def test_axes_are_linear_where_a_scale_or_a_norm_is_zero():
    pytest.importorskip("matplotlib")
    scaler = trained("..", zero_gradients=True)
    scale, norm = fastamp.debug.plot_history(scaler).axes
    assert (scale.get_yscale(), norm.get_yscale()) == ("log", "linear")
    scale, norm = fastamp.debug.plot_history(trained("..", init_scale=0.25)).axes
    assert (scale.get_yscale(), norm.get_yscale()) == ("log", "log")
    without = fastamp.debug.plot_history(trained("..", init_scale=0.0)).axes[0]
    assert without.get_yscale() == "linear"


@pytest.mark.parametrize("scaler", [trained(""), trained("..", history_size=0)])
def test_a_scaler_without_a_history_makes_an_empty_drawing(scaler: fastamp.GradScaler):
    pytest.importorskip("matplotlib")
    (axes,) = fastamp.debug.plot_history(scaler).axes
    assert list(axes.lines[0].get_xdata()) == []


def test_what_has_no_history_is_refused_and_a_missing_package_named(
    monkeypatch: pytest.MonkeyPatch,
):
    with pytest.raises(TypeError, match=r"expected a fastamp\.GradScaler, got GradScaler"):
        fastamp.debug.plot_history(torch.amp.GradScaler("cpu"))
    scaler = trained(".")
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plot_history: expected matplotlib to be installed"):
        fastamp.debug.plot_history(scaler)
