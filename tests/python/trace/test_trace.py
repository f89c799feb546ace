# SPDX-License-Identifier: Apache-2.0
"""A trace counts what the kernels did: checked against what the ops must do and what torch sees."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastamp
from fastamp._debug.trace import TraceRow
from support.autocast_state import torch_kernels
from support.casts import copies_made
from support.children import check_python

BF16 = torch.bfloat16


def only_row(trace: fastamp.debug.trace, op: str) -> TraceRow:
    (row,) = (row for row in trace.rows if row.op == op)
    return row


def test_a_row_says_op_dtypes_policy_and_casts():
    x, w = torch.ones(4, 8), torch.ones(8, 2, requires_grad=True)
    with fastamp.debug.trace() as t, fastamp.autocast("cpu"):
        torch.mm(x, w)
    (row,) = t.rows
    assert row == TraceRow(
        op="mm",
        device="cpu",
        policy="lower",
        inputs=("float32", "float32"),
        run_dtype="bfloat16",
        float8="",
        module="",
        source="",
        calls=1,
        weight_casts=1,
        other_casts=1,
        cast_bytes=2 * (4 * 8 + 8 * 2),
        cache_hits=0,
        activation_hits=0,
        kept_hits=0,
    )


def test_calls_that_look_the_same_share_a_row_and_others_do_not():
    x, w = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)
    with fastamp.debug.trace() as t:
        with fastamp.autocast("cpu"):
            for _ in range(3):
                torch.mm(x, w)
            torch.mm(x.bfloat16(), w)
        with fastamp.autocast("cpu", dtype=torch.float16):
            torch.mm(x, w)
    by_kind = {(row.inputs[0], row.run_dtype): row for row in t.rows}
    assert set(by_kind) == {
        ("float32", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("float32", "float16"),
    }
    same = by_kind["float32", "bfloat16"]
    assert (same.calls, same.weight_casts, same.cache_hits, same.other_casts) == (3, 1, 2, 3)
    assert by_kind["bfloat16", "bfloat16"].cache_hits == 1
    assert by_kind["float32", "float16"].weight_casts == 1
    assert t.totals["calls"] == 5


def test_uses_of_an_activation_that_was_edited_share_a_new_cast():
    a = torch.randn(4, 4, requires_grad=True) * 1
    with fastamp.debug.trace() as t, fastamp.autocast("cpu"):
        saved = [torch.mm(a, a)]  # their graphs hold the casts
        with torch.no_grad():
            a.mul_(2)
        saved += [torch.mm(a, a), torch.mm(a, a)]
    assert len(saved) == 3
    (row,) = t.rows
    assert (row.other_casts, row.activation_hits) == (2, 4)


def test_uses_of_one_activation_are_activation_hits():
    x = torch.ones(4, 4, requires_grad=True)
    with fastamp.debug.trace() as t, fastamp.autocast("cpu"):
        h = x * 2
        low = torch.ones(4, 4, dtype=BF16, requires_grad=True)
        saved = [torch.mm(h, low) for _ in range(3)]  # their graphs hold the cast
    assert len(saved) == 3
    (row,) = t.rows
    assert (row.other_casts, row.activation_hits, row.cast_bytes) == (1, 2, 32)


@pytest.mark.parametrize(
    ("name", "dtypes", "policy", "run_dtype"),
    [
        ("mm", [torch.float64, torch.float64], "lower", "float64"),
        ("mm", [torch.int32, torch.int32], "lower", "int32"),
        ("mm", [torch.float32, BF16], "lower", "bfloat16"),
        ("stack", [torch.float32, BF16], "promote", "float32"),
        ("stack", [BF16, BF16], "promote", "bfloat16"),
        ("prod", [BF16], "fp32", "float32"),
    ],
)
def test_run_dtype_is_the_one_the_op_ran_in(name, dtypes, policy, run_dtype):
    tensors = [torch.ones(2, 2, dtype=dtype) for dtype in dtypes]
    with fastamp.debug.trace() as t, fastamp.autocast("cpu"):
        out = getattr(torch, name)(*([tensors] if name == "stack" else tensors))
    row = only_row(t, name)
    assert (row.policy, row.run_dtype) == (policy, run_dtype)
    assert str(out.dtype) == f"torch.{run_dtype}"


def test_an_op_that_torch_does_not_list_is_not_recorded():
    # In a process of its own: an op whose policy was ever edited here has a kernel from then on.
    check_python(
        "-c",
        "import torch, fastamp\n"
        "x = torch.ones(2, 2)\n"
        "with fastamp.debug.trace() as t, fastamp.autocast('cpu'):\n"
        "    torch.dist(x, x)\n"
        "assert t.rows == []",
    )


def test_ops_outside_regions_and_ops_without_kernel_are_not_recorded():
    x = torch.ones(2, 2)
    with fastamp.debug.trace() as t:
        torch.mm(x, x)
        with fastamp.autocast("cpu"):
            torch.add(x, x)
        with fastamp.autocast("cpu"), fastamp.autocast("cpu", enabled=False):
            torch.mm(x, x)
    assert t.rows == []
    torch.mm(x, x)
    assert t.totals["calls"] == 0


def test_an_edited_policy_is_recorded_and_passing_ops_show_their_inner_ops():
    x = torch.ones(2, 2)
    with (
        fastamp.policies.override({"linear": "pass"}),
        fastamp.debug.trace() as t,
        fastamp.autocast("cpu"),
    ):
        torch.nn.functional.linear(x, x)
    rows = {row.op: row for row in t.rows}
    assert rows.pop("linear").policy == "pass"
    (inner,) = rows.values()
    assert inner.policy == "lower"
    assert inner.other_casts == 2


def test_casts_of_a_forward_pass_are_those_that_a_profiler_sees_with_torchs_kernels():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    x, y = torch.randn(2, 8), torch.randn(2, 4)

    def forward() -> None:
        with fastamp.autocast("cpu"):  # a mean would divide by a tensor that it casts itself
            torch.nn.functional.mse_loss(model(x), y, reduction="sum")

    with fastamp.debug.trace() as t:
        forward()
    with torch_kernels():
        assert copies_made(forward) == t.totals["weight_casts"] + t.totals["other_casts"]
    assert t.totals["weight_casts"] == 4


def test_gradient_casts_are_counted_with_their_size():
    w = torch.ones(8, 4, requires_grad=True)
    with fastamp.debug.trace() as t:
        with fastamp.autocast("cpu"):
            out = torch.mm(torch.ones(2, 8), w)
        out.sum().backward()
    assert (t.totals["gradient_casts"], t.totals["gradient_cast_bytes"]) == (1, 4 * 8 * 4)


def test_recomputation_in_backward_is_recorded():
    layer = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    with fastamp.debug.trace() as t:
        with fastamp.autocast("cpu"):
            out = checkpoint(layer, x, use_reentrant=False)
        out.sum().backward()
    assert only_row(t, "linear").calls == 2


def test_other_threads_are_recorded():
    x = torch.ones(2, 2)

    def work() -> None:
        with fastamp.autocast("cpu"):
            for _ in range(100):
                torch.mm(x, x)

    with fastamp.debug.trace() as t:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert only_row(t, "mm").calls == 400


def test_traces_nest_overlap_and_go_on():
    x = torch.ones(2, 2)
    outer, inner = fastamp.debug.trace(), fastamp.debug.trace()
    with fastamp.autocast("cpu"):
        outer.__enter__()
        torch.mm(x, x)
        inner.__enter__()
        torch.mm(x, x)
        outer.__exit__(None, None, None)
        torch.mm(x, x)
        inner.__exit__(None, None, None)
        assert (only_row(outer, "mm").calls, only_row(inner, "mm").calls) == (2, 2)
        with outer:
            torch.mm(x, x)
    assert only_row(outer, "mm").calls == 3


def test_an_open_trace_is_not_entered_twice_and_stays_open():
    x = torch.ones(2, 2)
    with fastamp.debug.trace() as t:
        with pytest.raises(RuntimeError, match="trace: expected a trace that is not open"):
            t.__enter__()
        with fastamp.autocast("cpu"):
            torch.mm(x, x)
    assert only_row(t, "mm").calls == 1


def test_an_op_that_throws_is_recorded_and_the_next_too():
    t = fastamp.debug.trace()
    with pytest.raises(RuntimeError), t, fastamp.autocast("cpu"):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    with t, fastamp.autocast("cpu"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    row = only_row(t, "mm")
    assert (row.calls, row.other_casts) == (2, 4)


def test_a_trace_dropped_while_open_does_not_record_forever():
    t = fastamp.debug.trace()
    t.__enter__()
    recorder = t._recorder
    del t
    with fastamp.autocast("cpu"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert recorder.rows() == []
    assert not recorder.stop()


def test_results_under_a_trace_are_the_same_bits():
    torch.manual_seed(0)
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def run() -> list[torch.Tensor]:
        with fastamp.autocast("cpu"):
            h = x * 2
            out = torch.mm(h, w) + torch.mm(h, w.t())
        return [out, *torch.autograd.grad(out.float().square().sum(), (x, w))]

    plain = run()
    with fastamp.debug.trace():
        traced = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
