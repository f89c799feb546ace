# SPDX-License-Identifier: Apache-2.0
"""The stages of make gpu: planned and run without a GPU, by commands that need none."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch

import gpu_record
import gpu_stage
import gpu_stages
from benchmarks.rows import all_rows
from gpu_record import Identity, Outcome, Record
from gpu_stages import Plan, Stage
from patience import patience

HERE = Identity("abc", "0123", "G")


def stage(*programs, seconds=60, environment=()):
    minutes = patience(seconds) / 60
    commands = [[sys.executable, "-c", program] for program in programs]
    return Stage("s", "a test", minutes, lambda _: Plan(commands), environment)


def run(one, tmp_path):
    outcome = gpu_stage.run_stage(one, tmp_path / "build", Record(tmp_path, HERE, ["s"], True))
    assert json.loads((tmp_path / "s.json").read_text()) == vars(outcome)
    assert list(tmp_path.glob("*.part")) == []
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
    program = (
        "import subprocess; child = subprocess.Popen(['sleep', '1000000']); "
        f"open({str(mark)!r}, 'w').write(str(child.pid)); child.wait()"
    )
    outcome = run(stage(program, seconds=2), tmp_path)
    assert outcome.status == "TOO LONG"
    state = Path(f"/proc/{mark.read_text()}/stat")
    # Ended: gone, or not yet collected by whoever is its parent now.
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX":
        time.sleep(0.01)  # It was killed, and has not been run since.


def test_variables_of_a_stage_are_set(tmp_path):
    program = "import os; print(os.environ['A_NAME'])"
    assert run(stage(program, environment=(("A_NAME", "value"),)), tmp_path).last == "value"


def test_what_cannot_run_is_skipped_with_its_reason(tmp_path):
    outcome = run(Stage("s", "", 1, lambda _: Plan(left_out=["no such tool"])), tmp_path)
    assert (outcome.status, outcome.last) == ("skipped", "no such tool")
    assert "- s: no such tool\n" in (tmp_path / "summary.md").read_text()


def test_a_stage_is_said_to_run_while_it_does(tmp_path):
    program = f"print(open({str(tmp_path / 's.json')!r}).read())"
    run(stage(program), tmp_path)
    assert '"status": "running"' in (tmp_path / "s.log").read_text()


def test_what_a_stage_needs_has_passed_or_it_is_skipped(tmp_path):
    record = Record(tmp_path, HERE, ["build", "s"], False)
    record.save(Outcome("build", "FAILED", 1.0, "error"))
    outcome = gpu_stage.run_stage(stage("print(1)"), tmp_path, record)
    assert (outcome.status, outcome.last) == ("skipped", "stage build: FAILED")


def test_a_program_that_is_missing_is_a_failure(tmp_path):
    command = [str(tmp_path / "no-such-program")]
    outcome = run(Stage("s", "", 1, lambda _: Plan([command])), tmp_path)
    assert outcome.status == "FAILED"
    assert "no-such-program" in outcome.last


def test_logs_tell_what_was_left_out():
    log = """-- left out: C++ tests: no Catch2
left out: time limits
SKIPPED [2] tests/a.py:3: torch's tests: expecttest is not installed
SKIPPED [1] tests/b.py: could not import 'timm': No module named 'timm'
SKIPPED [9] tests/c.py:1: no CUDA device
cuda: ViT: not measured: No module named 'timm'
left out: time limits
"""
    assert gpu_record.left_out_lines(log) == [
        "C++ tests: no Catch2",
        "time limits",
        "tests/a.py:3: torch's tests: expecttest is not installed",
        "tests/b.py: could not import 'timm': No module named 'timm'",
        "cuda: ViT: not measured: No module named 'timm'",
    ]


def test_a_record_is_of_one_tree_and_gpu(tmp_path):
    folder = tmp_path / "gpu"
    record = Record(folder, HERE, ["s", "t"], True)
    assert record.why == "there is no earlier run"
    record.save(Outcome("s", "passed", 1.0, "x"))
    record.save(Outcome("t", "running", 0.0, "x"))
    again = Record(folder, Identity("another commit, same files", "0123", "G"), ["s", "t"], True)
    assert again.why == ""
    assert [again.outcome(name).status for name in "st"] == ["passed", "CUT OFF"]
    other = Record(folder, Identity("abc", "4567", "G"), ["s", "t"], True)
    assert other.why == "tree was 0123, is 4567"
    assert other.outcome("s").status == "not run"
    assert (tmp_path / "gpu-before" / "s.json").is_file()
    assert not (folder / "s.json").exists()
    fresh = Record(folder, Identity("abc", "4567", "G"), ["s", "t"], False)
    assert fresh.outcome("s").status == "not run"


def test_a_tree_is_what_is_built_and_run_and_not_what_a_run_writes(tmp_path):
    def tree():
        return gpu_record.identify(tmp_path, "G").tree

    for name in ("src", "docs", "benchmarks/results", "python/fastamp/lib", "tests/__pycache__"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "src" / "a.cu").write_text("a")
    before = tree()
    for name in (
        "docs/performance.md",
        "README.md",
        "benchmarks/results/r.json",
        "python/fastamp/lib/libfastamp.so.0.1",
        "tests/__pycache__/a.pyc",
    ):
        (tmp_path / name).write_text("made")
    assert tree() == before
    assert gpu_record.identify(tmp_path, "G").commit == "unknown"
    (tmp_path / "src" / "a.cu").write_text("b")
    assert tree() != before


def chosen(record, names=None, resume=True):
    return [one.name for one in gpu_stage.chosen_stages(names, record, resume)]


def test_stages_that_passed_are_left_out_and_the_report_follows_its_rows(tmp_path):
    names = [one.name for one in gpu_stages.STAGES]
    record = Record(tmp_path, HERE, names, True)
    assert chosen(record) == names
    for name in names:
        record.save(Outcome(name, "passed", 1.0, ""))
    assert chosen(record) == []
    assert chosen(record, resume=False) == names
    assert chosen(record, ["ctest"]) == []
    assert chosen(record, ["ctest"], resume=False) == ["build", "build-rest", "ctest"]
    assert chosen(record, ["pytest"], resume=False) == ["build", "pytest"]
    for status in ("FAILED", "TOO LONG", "INTERRUPTED", "CUT OFF", "skipped"):
        record.save(Outcome("bench-steps", status, 1.0, ""))
        assert chosen(record) == ["build", "bench-steps", "report"]
    record.save(Outcome("build-rest", "FAILED", 1.0, ""))
    assert chosen(record) == ["build", "build-rest", "bench-steps", "report"]


def test_all_stages_together_take_at_most_25_minutes():
    assert sum(one.minutes for one in gpu_stages.STAGES) <= 25


def test_every_gpu_row_is_in_one_stage():
    for row in all_rows(["cuda"]):
        places = [name for name, (p, _) in gpu_stages.BENCHES.items() if re.search(p, row.name)]
        assert len(places) == 1, row.name


def test_builds_have_the_cuda_part_or_fail(tmp_path):
    builds = [one for one in gpu_stages.STAGES if one.name in gpu_stages.CPP]
    assert [one.environment for one in builds] == [gpu_stages.WITH_CUDA] * 2
    for one in builds:
        (command,) = one.plan(tmp_path).commands
        assert command[1].endswith("tools/cmake_build.py")
        assert command[2:4] == ["--tests", "AUTO"]


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
        commands = stages[name].plan(tmp_path).commands
        assert all(
            command[:3] == ["/bin/compute-sanitizer", "--tool", tool] for command in commands
        )
        assert [command[7:] for command in commands[:2]] == [["one", tags], ["two", "x", tags]]
        assert "tests/python/ops" in commands[2]
        # Nothing captures without the allocator's cache, where an allocation would end the capture.
        uncached = stages[name].environment == gpu_stages.UNCACHED
        assert uncached == ("cuda and not graph and not hypothesis" in commands[2])


def test_without_cpp_tests_the_sanitizer_runs_pythons(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_stages, "find_sanitizer", lambda: "/bin/compute-sanitizer")
    (tmp_path / "CMakeCache.txt").write_text("FASTAMP_TESTS_LEFT_OUT:INTERNAL=no Catch2\n")
    stages = {one.name: one for one in gpu_stages.STAGES}
    plan = stages["memcheck"].plan(tmp_path)
    assert [command[-1] for command in plan.commands] == ["tests/python/ops"]
    assert plan.left_out == ["C++ tests: no Catch2"]
    assert stages["ctest"].plan(tmp_path) == Plan([], ["C++ tests: no Catch2"])


def test_every_test_that_captures_a_graph_is_marked():
    tests = Path(__file__).resolve().parents[2]
    captures = r"torch\.cuda\.(graph\(|CUDAGraph)"
    for path in (tests / "python").rglob("test_*.py"):
        if path == Path(__file__) or path.parent.name == "simulated_cuda":  # never on a GPU
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
