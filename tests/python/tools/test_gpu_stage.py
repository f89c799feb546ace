# SPDX-License-Identifier: Apache-2.0
"""The stages of make gpu: planned and run without a GPU, by commands that need none."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import gpu_stage
import gpu_stages
from benchmarks.rows import all_rows
from gpu_stages import Stage


def stage(*programs, minutes=1.0, environment=()):
    commands = [[sys.executable, "-c", program] for program in programs]
    return Stage("s", "a test", minutes, lambda _: commands, environment)


def run(one, tmp_path):
    outcome = gpu_stage.run_stage(one, tmp_path / "build", tmp_path)
    assert json.loads((tmp_path / "s.json").read_text()) == vars(outcome)
    return outcome


def test_outcome_and_log_are_written_as_a_stage_ends(tmp_path):
    outcome = run(stage("print('one')", "print('two'); print()"), tmp_path)
    assert (outcome.status, outcome.last) == ("passed", "two")
    log = (tmp_path / "s.log").read_text()
    assert "one\n" in log
    assert log.count("$ ") == 2


def test_a_failure_is_told_and_later_commands_still_run(tmp_path):
    outcome = run(stage("raise SystemExit(3)", "print('after')"), tmp_path)
    assert (outcome.status, outcome.last) == ("FAILED", "after")


def test_a_stage_that_takes_too_long_is_ended_with_its_children(tmp_path):
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(4); open({str(mark)!r}, 'w')"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    outcome = run(stage(program, minutes=1.5 / 60), tmp_path)
    assert outcome.status == "TOO LONG"
    import time

    time.sleep(4)
    assert not mark.exists()


def test_variables_of_a_stage_are_set(tmp_path):
    program = "import os; print(os.environ['A_NAME'])"
    assert run(stage(program, environment=(("A_NAME", "value"),)), tmp_path).last == "value"


def test_what_cannot_run_is_skipped_with_its_reason(tmp_path):
    outcome = run(Stage("s", "", 1, lambda _: "no such tool"), tmp_path)
    assert (outcome.status, outcome.last) == ("skipped", "no such tool")


def test_all_stages_together_take_at_most_25_minutes():
    assert sum(one.minutes for one in gpu_stages.STAGES) <= 25


def test_every_gpu_row_is_in_one_stage():
    for row in all_rows(["cuda"]):
        places = [name for name, (p, _) in gpu_stages.BENCHES.items() if re.search(p, row.name)]
        assert len(places) == 1, row.name


def test_list_and_dry_run_need_no_gpu(capsys):
    assert gpu_stage.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(one.name in listed for one in gpu_stages.STAGES)
    assert gpu_stage.main(["--dry-run", "--stage", "pytest", "--stage", "bench-claims"]) == 0
    planned = capsys.readouterr().out
    assert "-m pytest -q --continue-on-collection-errors -m cuda" in planned
    assert "claim" in planned
    assert "ctest" not in planned


def test_sanitizer_runs_every_program_and_the_kernels_python_tests(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_stages, "find_sanitizer", lambda: "/bin/compute-sanitizer")
    monkeypatch.setattr(gpu_stages, "cuda_tests", lambda _: [["one"], ["two", "x"]])
    stages = {one.name: one for one in gpu_stages.STAGES}
    for name in ("memcheck", "racecheck", "graphs"):
        tool = "memcheck" if name == "graphs" else name
        tags = "[graph]" if name == "graphs" else "~[graph]"
        commands = stages[name].commands(tmp_path)
        assert all(
            command[:3] == ["/bin/compute-sanitizer", "--tool", tool] for command in commands
        )
        assert [command[7:] for command in commands[:2]] == [["one", tags], ["two", "x", tags]]
        assert "tests/python/ops" in commands[2]
        # Nothing captures without the allocator's cache, where an allocation would end the capture.
        uncached = stages[name].environment == gpu_stages.UNCACHED
        assert uncached == ("cuda and not graph" in commands[2])


def test_every_test_that_captures_a_graph_is_marked():
    tests = Path(__file__).resolve().parents[2]
    captures = r"torch\.cuda\.(graph\(|CUDAGraph)"
    for path in (tests / "python").rglob("test_*.py"):
        if path == Path(__file__):
            continue
        for test in re.split(r"\n\n\n", path.read_text()):
            assert "@pytest.mark.graph" in test or not re.search(captures, test), path
    for path in (tests / "cpp").rglob("test_*.cpp"):
        text = path.read_text()
        assert "[graph]" in text or not re.search(
            r"at::cuda::CUDAGraph|\[cuda\].*GraphedStep", text
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_claimed():
    with pytest.raises(SystemExit, match="no CUDA GPU here"):
        gpu_stage.main(["--stage", "report"])
