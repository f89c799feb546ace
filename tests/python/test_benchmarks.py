"""The benchmark measures what it says, and its table hides nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import report, results_file, table  # noqa: E402
from benchmarks.harness import (  # noqa: E402
    BASELINE,
    OURS,
    Candidate,
    Effort,
    Result,
    Row,
    at_least_times,
    measure,
)
from benchmarks.rows import all_rows  # noqa: E402


def result(name, baseline, ours):
    return Result(name, 1, {BASELINE: baseline, OURS: ours})


def test_blocks_take_turns_and_hooks_run_outside_the_clock():
    import time

    calls = []

    def candidates():
        return {
            name: Candidate(
                "work()",
                {"work": lambda name=name, pause=pause: (calls.append(name), time.sleep(pause))},
                before=lambda: time.sleep(0.01),
            )
            for name, pause in ((BASELINE, 0.002), (OURS, 0.001))
        }

    found = measure(
        Row("r", candidates, goal=at_least_times(1.2)), Effort(repeats=4, block_seconds=1e-6)
    )
    assert found.calls_per_block == 1
    turns = calls[::2]  # each block runs the statement once more, before it is timed
    assert turns[-8:] == [BASELINE, OURS, OURS, BASELINE] * 2
    assert 1e6 < found.median(OURS) < found.median(BASELINE) < 9e6
    assert found.goal_reached


def test_slow_rows_get_fewer_repeats_but_never_too_few():
    import time

    def candidates():
        return {name: Candidate("sleep(0.01)", {"sleep": time.sleep}) for name in (BASELINE, OURS)}

    effort = Effort(repeats=100, block_seconds=1e-6, row_seconds=0.2, least_repeats=3)
    assert 3 <= len(measure(Row("r", candidates), effort).samples[OURS]) <= 6


def test_speedup_pairs_neighbours_so_that_drift_cancels():
    drift = [1.0, 10.0, 100.0, 1000.0]
    found = result("r", [2 * d for d in drift], drift)
    assert found.speedup() == (2, 2, 2)


def test_slower_rows_are_named_and_noise_is_called_noise():
    results = [
        result("fast", [2.0, 2.1, 2.2], [1.0, 1.0, 1.0]),
        result("slow", [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]),
        result("even", [1.0, 0.9, 1.1], [1.01, 1.0, 1.0]),
    ]
    text = table.summary(results)
    assert "slower than torch.amp in 2 of 3 rows" in text
    assert "slow: 0.50x (quartiles 0.50-0.50)" in text
    assert "even: 0.99x" in text
    assert text.count("within noise") == 1


def test_narrow_tables_fit(monkeypatch):
    results = [result("x" * 40, [2e3, 2e3], [1e3, 1e3])]
    monkeypatch.setenv("COLUMNS", "60")
    lines = table.text_table(results).splitlines()
    assert max(map(len, lines)) <= 60
    assert "2.00x" in lines[-1]


def test_saved_results_come_back(tmp_path):
    path = tmp_path / "r.json"
    results = [result("a", [1.0, 2.0], [3.0, 4.5])]
    results_file.save(path, {"gpu": "none"}, results, ["a note"])
    assert results_file.load(path) == ({"gpu": "none"}, results, ["a note"])


def test_row_names_are_unique():
    names = [row.name for row in all_rows()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "row", [r for r in all_rows() if "10000" not in r.name], ids=lambda r: r.name
)
def test_rows_leave_autocast_as_it_was(row):
    if "600k" in row.name:
        pytest.skip("needs a second and 700 MB")
    import fastamp

    state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    found = measure(row, Effort(2, 1e-6, row_seconds=0, least_repeats=2))
    assert all(len(samples) == 2 and min(samples) > 0 for samples in found.samples.values())
    assert {BASELINE, OURS} <= found.samples.keys()
    assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == state
    assert fastamp._C.is_installed()


def test_command_line_filters_and_keeps_raw_samples(tmp_path):
    out = tmp_path / "raw.json"
    words = ["--quick", "--filter", "region: reused", "--out", str(out)]
    text = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    document = json.loads(out.read_text())
    assert [row["name"] for row in document["rows"]] == ["region: reused"]
    assert len(document["rows"][0]["samples"][OURS]) >= 30
    assert document["environment"]["torch"] == torch.__version__
    assert "speed-up" in text
    assert "fastamp is slower than torch.amp in" in text


def test_performance_page_is_generated_from_the_raw_results():
    assert report.PAGE.read_text(encoding="utf-8") == report.page()
