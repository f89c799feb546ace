# SPDX-License-Identifier: Apache-2.0
"""The list of breaks fits today's kernels, and tables say what was and what was not run."""

from __future__ import annotations

import pytest

import mutate_kernels
from mutate_kernels import MUTANTS, ROOT


def test_there_are_enough_and_no_two_have_one_name():
    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_break_changes_today_s_source(mutant):
    assert mutant.text()  # or an error: the text to replace must occur once


def test_sources_and_tests_exist():
    tests = (ROOT / "tests/cpp/cuda_on_cpu/CMakeLists.txt").read_text(encoding="utf-8")
    for mutant in MUTANTS:
        for name in (*mutant.group.sources, *mutant.group.tests):
            assert name in tests


def test_a_changed_file_drops_its_result():
    first, second = MUTANTS[:2]
    results = {
        first.name: {"by": "tsan", "seen": "data race", "digest": first.digest()},
        second.name: {"by": "plain", "seen": "wrong result", "digest": "of another file"},
    }
    table = mutate_kernels.table([first, second], results)
    assert f"| {first.group.file} | {first.change.name} | tsan | data race |" in table
    assert table.endswith(f"Not run yet: 1\n- {second.name}")


def test_a_stopped_run_leaves_no_changed_file_to_the_next(tmp_path, monkeypatch):
    left = tmp_path / "mutants" / "src" / "kernels" / "cuda" / "step_operands.cuh"
    left.parent.mkdir(parents=True)
    left.write_text("broken")
    monkeypatch.setattr(mutate_kernels, "Build", lambda *_: None)
    assert (
        mutate_kernels.main(["--build-dir", str(tmp_path), "--only", "no break is called so"]) == 0
    )
    assert not left.exists()
