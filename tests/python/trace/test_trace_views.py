# SPDX-License-Identifier: Apache-2.0
"""A trace as a table and as a plot."""

from __future__ import annotations

import sys

import pytest
import torch

import fastamp


@pytest.fixture
def traced() -> fastamp.debug.trace:
    x, w = torch.ones(16, 16), torch.ones(16, 16, requires_grad=True)
    with fastamp.debug.trace() as t, fastamp.autocast("cpu"):
        torch.cat([x[:1]] * 3 + [x[:1].bfloat16()])
        for _ in range(5):
            torch.mm(x, w)
        for _ in range(9):
            torch.bmm(x.bfloat16()[None], x.bfloat16()[None])
    return t


def ops_of(table: str) -> list[str]:
    return [line.split()[0] for line in table.splitlines()[3:-3]]


@pytest.mark.parametrize(
    ("sort_by", "ops"),
    [
        ("cast_bytes", ["mm", "cat", "bmm"]),
        ("casts", ["mm", "cat", "bmm"]),
        ("calls", ["bmm", "mm", "cat"]),
        ("name", ["bmm", "cat", "mm"]),
    ],
)
def test_table_is_sorted(traced, sort_by, ops):
    assert ops_of(traced.table(sort_by)) == ops


def test_table_has_aligned_columns_and_totals(traced):
    lines = str(traced).splitlines()
    assert len({len(line) for line in lines[:-1]}) == 1
    assert lines[1].split()[:2] == ["Op", "Device"]
    total = next(line for line in lines if line.startswith("Total"))
    totals = traced.totals
    assert total.split() == [
        "Total",
        str(totals["calls"]),
        str(totals["weight_casts"]),
        str(totals["other_casts"]),
        f"{totals['cast_bytes'] / 1024:.2f}",
        "KiB",
        str(totals["cache_hits"]),
        "0",
        "0",
    ]
    assert lines[-1] == "Gradients cast back: 0 (0 B)"
    cat = next(line for line in lines if line.startswith("cat"))
    assert "float32 x3, bfloat16" in cat


def test_row_limit_says_what_it_left_out(traced):
    table = traced.table(row_limit=1)
    assert "\n2 more rows\n" in table
    assert "\nmm " in table
    assert "\nbmm " not in table
    assert "Total" in table


def test_an_unknown_order_is_refused(traced):
    expected = "expected sort_by to be one of cast_bytes, casts, calls, name, got 'size'"
    with pytest.raises(ValueError, match=expected):
        traced.table("size")


def test_an_empty_trace_prints():
    with fastamp.debug.trace() as t:
        pass
    assert "Total" in str(t)
    assert t.to_dict()["ops"] == []


def test_plot_writes_an_image(traced, tmp_path):
    pytest.importorskip("matplotlib")
    figure = traced.plot(tmp_path / "trace.png", row_limit=2)
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    counts, sizes = figure.axes
    assert [label.get_text() for label in counts.get_yticklabels()] == ["mm", "cat"]
    widths = [patch.get_width() for patch in sizes.patches]
    rows = {row.op: row.cast_bytes for row in traced.rows}
    assert widths == [rows["mm"] / 2**20, rows["cat"] / 2**20]


def test_plot_without_matplotlib_says_what_to_install(traced, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"trace\.plot: expected matplotlib to be installed"):
        traced.plot()


def test_importing_fastamp_does_not_import_matplotlib():
    from support.children import check_python

    code = "import sys, fastamp; print('matplotlib' in sys.modules)"
    assert check_python("-c", code).strip() == "False"
