# SPDX-License-Identifier: Apache-2.0
"""Where calls came from, what fake tensors and ops of users leave in a trace, and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fastamp
from fastamp._debug.trace import TraceRow

BF16 = torch.bfloat16


def only_row(trace: fastamp.debug.trace, op: str) -> TraceRow:
    (row,) = (row for row in trace.rows if row.op == op)
    return row


def test_source_is_the_users_line(monkeypatch):
    layer = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with (
        fastamp.debug.trace(source=True) as t,
        fastamp.debug.trace() as plain,
        fastamp.autocast("cpu"),
    ):
        layer(x)
        for _ in range(2):
            layer(x)
    first = test_source_is_the_users_line.__code__.co_firstlineno
    sources = {row.source: row.calls for row in t.rows}
    assert sources == {f"{__file__}:{first + 8}": 1, f"{__file__}:{first + 10}": 2}
    assert only_row(plain, "linear").calls == 3
    assert only_row(plain, "linear").source == ""
    monkeypatch.chdir(Path(__file__).parents[1])
    assert f" trace/test_trace_sources.py:{first + 10} " in str(t)


class Doubled(torch.nn.Module):
    """A model that calls ops by itself, a part that it holds, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 4)) for _ in range(2)
        )
        self.beside = (torch.nn.Linear(4, 4),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.beside[0](torch.mm(self.blocks[1](x), x))


def test_modules_are_named_from_the_outermost_on():
    model, x = Doubled(), torch.ones(4, 4)
    with fastamp.debug.trace(source=True) as t, fastamp.autocast("cpu"):
        model(x).sum().backward()
        torch.addmm(x, x, x)
        with pytest.raises(RuntimeError):
            model(torch.ones(4, 5))
    found = {(row.op, row.module) for row in t.rows if row.op != "sum"}
    assert found >= {
        ("linear", "blocks.1.1"),
        ("mm", "Doubled"),
        ("linear", "Linear"),
        ("addmm", ""),
    }
    assert {module for _, module in found} == {"blocks.1.1", "Doubled", "Linear", ""}
    heading, *rows = str(t).splitlines()[1:]
    assert "  Module " in heading
    assert any(row.startswith("linear ") and "  blocks.1.1  " in row for row in rows)
    assert json.loads(t.to_json())["ops"][0].keys() >= {"source", "module"}


def test_a_module_without_children_that_can_be_read_is_named_by_its_class():
    class Odd(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.__dict__["_modules"] = None
            return torch.nn.Linear(4, 4)(x)

    model = Odd()
    with fastamp.debug.trace(source=True) as t, fastamp.autocast("cpu"):
        model(torch.ones(4, 4))
    assert only_row(t, "linear").module == "Linear"


def test_source_must_be_a_bool():
    with pytest.raises(TypeError, match="trace: expected source to be a bool, got str"):
        fastamp.debug.trace(source="yes")


def test_fake_tensors_are_recorded():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = torch.empty(4, 4)
        symbolic = mode.from_tensor(torch.empty(0, device="meta").new_empty(6, 6))
        with fastamp.debug.trace() as t, fastamp.autocast("cpu"):
            torch.mm(x, x)
            torch.mm(torch.empty(6, 6), torch.empty(6, 6))
    assert symbolic.shape == (6, 6)
    row = only_row(t, "mm")
    assert (row.calls, row.other_casts, row.cast_bytes) == (2, 4, 2 * 2 * (16 + 36))


def test_symbolic_sizes_count_as_no_bytes():
    sizes = []

    def f(x: torch.Tensor) -> torch.Tensor:
        with fastamp.debug.trace() as t, fastamp.autocast("cpu"):
            out = torch.mm(x, x)
        sizes.append(only_row(t, "mm").cast_bytes)
        return out

    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(f, tracing_mode="symbolic")(torch.ones(3, 3))
    assert graph(torch.ones(3, 3)).dtype == BF16
    assert sizes == [0]


def test_ops_of_users_are_recorded():
    with torch.library._scoped_library("fastamp_trace_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        fastamp.policies.register_op("fastamp_trace_test::twice", "lower", "cpu")
        try:
            with fastamp.debug.trace() as t, fastamp.autocast("cpu"):
                torch.ops.fastamp_trace_test.twice(torch.ones(2))
        finally:
            fastamp.policies.unregister_op("fastamp_trace_test::twice")
    row = only_row(t, "fastamp_trace_test::twice")
    assert (row.policy, row.inputs, row.run_dtype) == ("lower", ("float32",), "bfloat16")
    assert (row.other_casts, row.cast_bytes) == (1, 4)


def test_to_json_holds_every_row(tmp_path):
    x = torch.ones(2, 2)
    with fastamp.debug.trace(source=True) as t, fastamp.autocast("cpu"):
        torch.mm(x, x)
        torch.cat([x, x])
    text = t.to_json(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text() == text + "\n"
    record = json.loads(text)
    rows = {TraceRow(**{**row, "inputs": tuple(row["inputs"])}) for row in record["ops"]}
    assert rows == set(t.rows)
    assert record["totals"]["cast_bytes"] == t.totals["cast_bytes"] > 0
    assert record["gradient_casts"] == {"casts": 0, "bytes": 0}
    with pytest.raises(OSError, match="absent"):
        t.to_json(tmp_path / "absent" / "trace.json")
