# SPDX-License-Identifier: Apache-2.0
"""Bandwidth is what was measured over what was moved, and predictions are called predictions."""

from pathlib import Path

import pytest
import torch

from benchmarks import pages, results_file, table, traffic
from benchmarks.harness import BASELINE, COPY, FASTAMP, Candidate, Effort, Result, Row, measure
from benchmarks.rows import all_rows
from benchmarks.rows.kernels import kernel_rows

DOCS = Path(__file__).resolve().parents[3] / "docs" / "cuda.md"
MIB = 2**20


def timed(done, own, copied, copy_bytes):
    """A row whose every repeat took so many nanoseconds."""
    samples = {BASELINE: [2 * own] * 3, FASTAMP: [own] * 3, COPY: [copied] * 3}
    moved = traffic.total(done)
    return Result("cuda: r", 1, samples, moved, device="cuda", passes=done, copy_bytes=copy_bytes)


def test_docs_show_the_table_that_rows_use():
    lines = DOCS.read_text().split("| Predicted share of a copy's bandwidth |\n")[1].splitlines()
    shown = [line.strip("| ").split(" | ") for line in lines[1 : lines.index("")]]
    assert shown == [
        [
            name,
            f"{kernel.read} read, {kernel.written} written",
            traffic.percent(*kernel.predicted),
        ]
        for name, kernel in traffic.KERNELS.items()
    ]


def test_share_is_of_a_copy_in_the_same_repeat():
    done = traffic.passes(64 * MIB, "unscale")
    # The machine halves its speed from repeat to repeat: shares stay.
    found = timed(done, 1, 1, 256 * MIB)
    found.samples[FASTAMP], found.samples[COPY] = [2e5, 4e5, 8e5], [9e4, 18e4, 36e4]
    assert traffic.share(found) == pytest.approx((0.9, 0.9, 0.9))


def test_what_is_shown_names_measured_and_predicted():
    done = traffic.passes(64 * MIB, "unscale with norm")
    found = timed(done, 512 * MIB / 3000, 1024 * MIB / 4000, 1024 * MIB)
    text = "3000 GB/s, 75 % (75 %) of a copy's 4000 GB/s; predicted 85-90 %"
    assert traffic.shown(found) == text
    assert text in table.text_table([found])
    assert "copy" not in table.others(found)


def test_kernels_of_a_row_are_added_by_their_times():
    done = traffic.passes(64 * MIB, "norm", "AdamW")
    assert [count // (64 * MIB) for _, count in done] == [4, 32]
    low, high = traffic.predicted(done)
    assert low == pytest.approx(36 / (4 / 0.85 + 32 / 0.88))
    assert high == pytest.approx(36 / (4 / 0.9 + 32 / 0.93))
    assert traffic.passes(10, "unscale", written=False) == [("unscale", 40)]


def test_small_lists_have_a_bandwidth_and_no_prediction():
    found = timed(traffic.passes(MIB, "unscale"), 1e4, 1e4, 8 * MIB)
    assert traffic.predicted(found.passes) is None
    assert "predicted" not in traffic.shown(found)
    assert "100 % (100 %) of a copy's 839 GB/s" in traffic.shown(found)


def test_page_has_the_column_only_where_a_row_has_a_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    path = tmp_path / "2026-01-01-abc-cpu.json"
    plain = Result("r", 1, {BASELINE: [2.0] * 3, FASTAMP: [1.0] * 3}, bytes_moved=9)
    done = traffic.passes(64 * MIB, "norm")
    for rows, columns in (([plain], 7), ([plain, timed(done, 1e5, 1e5, 256 * MIB)], 8)):
        results_file.save(path, {"gpu": "none", "date": "2", "revision": "a"}, rows, [])
        text = pages.section(path)
        assert (pages.COPY_COLUMN in text) == (columns == 8)
        (line,) = (line for line in text.splitlines() if line.startswith("| r |"))
        assert line.count("|") == columns + 1
    assert "2684 GB/s, 100 % (100 %) of a copy's 2684 GB/s; predicted 85-90 %" in text
    assert results_file.load(path)[1][1].passes == done


def test_gpu_rows_of_kernels_take_turns_with_a_copy_and_others_do_not():
    rows = all_rows(["cpu", "cuda"])
    having = [row for row in rows if row.copy_bytes]
    assert {row.name for row in having} == {row.name for row in rows if row.clock == "events"}
    for row in having:
        assert row.bytes_moved == traffic.total(row.passes) > 0
        assert row.copy_bytes == min(row.bytes_moved, traffic.LARGEST_COPY)


def test_the_copy_is_timed_with_the_others():
    candidates = {name: Candidate("None", {}) for name in (BASELINE, FASTAMP)}
    row = Row("r", lambda: traffic.with_copy(lambda: candidates, MIB, "cpu"), copy_bytes=MIB)
    found = measure(row, Effort(3, 1e-6, 0, 3, 0, 3))
    assert min(found.samples[COPY]) > 1e3  # half a MiB is copied
    assert found.copy_bytes == MIB
    made = row.candidates()[COPY].names
    assert made["source"].nbytes + made["target"].nbytes == MIB


@pytest.mark.parametrize("row", kernel_rows("cpu", 3, 40, "small"), ids=lambda row: row.name)
def test_rows_of_single_kernels_run_and_count_what_they_touch(row):
    found = measure(row, Effort(3, 1e-6, 0, 3, 0, 3))
    assert min(min(samples) for samples in found.samples.values()) > 0
    candidate = row.candidates()[FASTAMP]
    if "step" not in candidate.names:
        assert row.bytes_moved == 8 * sum(g.numel() for g in candidate.names["g"])
        return
    optimizer = candidate.names["step"].__self__
    parameters = optimizer.param_groups[0]["params"]
    gradients = [parameter.grad.clone() for parameter in parameters]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, gradients, strict=True))
    state = [
        tensor
        for parameter in parameters
        for tensor in [parameter, *optimizer.state.get(parameter, {}).values()]
        if tensor is not None and tensor.numel() == parameter.numel()
    ]
    changed, read = sum(t.nbytes for t in state), sum(g.nbytes for g in gradients)
    assert row.bytes_moved == 2 * changed + read


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("cpu: unscale_, 64 KiB in 16 tensors", 8),
        ("cpu: unscale_, 1 MiB in 16 tensors", 8),
        ("cpu: norm and check, 150 x 600k", 4),
    ],
)
def test_bytes_are_those_of_the_tensors_of_a_row(name, each):
    (row,) = (row for row in all_rows(["cpu"]) if row.name == name)
    names = row.candidates()[FASTAMP].names
    if "optimizer" in names:
        tensors = [p.grad for p in names["optimizer"].param_groups[0]["params"]]
    else:
        tensors = names["g"]
    assert row.bytes_moved == each * sum(tensor.numel() for tensor in tensors)
