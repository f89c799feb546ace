# SPDX-License-Identifier: Apache-2.0
"""`make gpu` rehearsed from its first stage to its last: real scripts, a GPU that is pretended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import results_file
from patience import patience
from support.children import child_environment
from support.pretended_gpu import GPU

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
PRETENDER = ROOT / "tests" / "python" / "support" / "pretended_gpu.py"
# The real program; only its interpreter for children and its folder are others.
DRIVER = """
import sys
from pathlib import Path
import gpu_stages
gpu_stages.FOLDER = Path({folder!r})
sys.executable = {python!r}
import gpu_stage
sys.exit(gpu_stage.main(sys.argv[1:]))
"""
NAMES = ["build", "build-rest", "ctest", "pytest", "bench-micro", "bench-steps", "memcheck"]
NAMES += ["racecheck", "graphs"]
NAMES += ["bench-float8", "bench-training", "bench-claims", "report"]


class Rehearsal:
    """A machine with a pretended GPU in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.logs, self.build = folder, folder / "gpu", folder / "build"
        for name in ("bin", "build", "docs/plots", "benchmarks/results"):
            (folder / name).mkdir(parents=True)
        (folder / "README.md").write_text((ROOT / "README.md").read_text())
        for tool in ("python", "ctest", "compute-sanitizer"):
            program = folder / "bin" / tool
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{PRETENDER}" {tool} "$@"\n')
            program.chmod(0o755)
        self.code = DRIVER.format(folder=str(self.logs), python=str(folder / "bin" / "python"))

    def start(self, *words: str) -> subprocess.Popen:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = child_environment(PATH=path, REHEARSAL=str(self.folder))
        environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
        return subprocess.Popen(
            [sys.executable, "-c", self.code, "--build-dir", str(self.build), *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str]:
        with self.start(*words) as process:
            output, _ = process.communicate(timeout=patience(120))
        return process.returncode, output

    def behave(self, **what) -> None:
        (self.folder / "behavior.json").write_text(json.dumps(what))

    def take_calls(self) -> list[dict]:
        """Returns the calls since the last time."""
        path = self.folder / "calls.jsonl"
        calls = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        return calls

    def statuses(self) -> dict[str, str]:
        summary = json.loads((self.logs / "summary.json").read_text())
        return {one["stage"]: one["status"] for one in summary["stages"]}


@pytest.fixture
def rehearsal(tmp_path) -> Rehearsal:
    return Rehearsal(tmp_path)


def kinds(calls):
    """What was called, in order, without repeats; rows left out."""
    found = []
    for call in calls:
        if "row" not in call:
            words = call["words"]
            known = ("--package", "--gpu-tests", "merge", "memcheck", "racecheck", "pytest")
            named = [word for word in known if word in words] or [Path(words[-1]).name]
            kind = (
                named[0] if call["tool"] != "ctest" or "--show-only=json-v1" in words else "ctest"
            )
            if found[-1:] != [kind]:
                found.append(kind)
    return [kind for kind in found if kind != "--show-only=json-v1"]


def test_every_stage_runs_in_order_and_leaves_log_and_outcome(rehearsal):
    status, output = rehearsal.run()
    assert status == 0, output
    assert rehearsal.statuses() == dict.fromkeys(NAMES, "passed")
    calls = rehearsal.take_calls()
    gpu_question, *order = kinds(calls)
    assert "torch.cuda.get_device_name" in gpu_question
    assert order == [
        "--package",
        "--gpu-tests",
        "ctest",
        "pytest",
        "bench-micro-rows.json",
        "bench-steps-rows.json",
        "memcheck",
        "racecheck",
        "memcheck",
        "bench-float8-rows.json",
        "bench-training-rows.json",
        "bench-claims-rows.json",
        "merge",
        "benchmarks.report",
    ]
    sanitized = [call for call in calls if call.get("tool") == "compute-sanitizer"]
    assert len(sanitized) == 9
    for call in sanitized:
        captures = "[graph]" in call["words"] or "cuda and graph" in call["words"]
        assert call["uncached"] == (not captures)
    for name in NAMES:
        assert (rehearsal.logs / f"{name}.log").read_text().startswith("$ ")
        assert json.loads((rehearsal.logs / f"{name}.json").read_text())["status"] == "passed"
    page = (rehearsal.folder / "docs" / "performance.md").read_text()
    assert f"## {GPU}, " in page
    assert "cuda: claim: ViT-B" in page
    rate = "3273 GB/s, 90 % (90 %) of a copy's 3636 GB/s"
    assert f"| {rate}; predicted 85-90 % |" in page
    assert rate in (rehearsal.logs / "bench-steps.log").read_text()
    (result,) = (rehearsal.folder / "benchmarks" / "results").glob("*.json")
    rows = results_file.load(result)[1]
    assert len(rows) == sum("row" in call for call in calls) > 40
    assert (
        "- pytest: tests/python/optim/test_torch_cases.py:12: torch's tests: expecttest" in output
    )
    assert (rehearsal.logs / "summary.md").read_text() in output


def wait_for_rows(path, count, process):
    end = time.monotonic() + patience(60)
    while not path.exists() or len(results_file.load(path)[1]) < count:
        assert time.monotonic() < end
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)


def test_an_interrupted_run_goes_on_where_it_was(rehearsal):
    (rehearsal.build / "CMakeCache.txt").write_text("FASTAMP_TESTS_LEFT_OUT:INTERNAL=no Catch2\n")
    rehearsal.behave(fail=["pytest"], hang="cuda: unscale_, 1000 x 16")
    rows = rehearsal.logs / "bench-micro-rows.json"
    with rehearsal.start() as process:
        wait_for_rows(rows, 3, process)
        assert rehearsal.statuses()["bench-micro"] == "running"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=patience(60))
    assert process.returncode == 130
    assert "to go on: make gpu RESUME=1" in output
    before = rehearsal.statuses()
    assert [before[name] for name in NAMES[:6]] == [
        "passed",
        "passed",
        "skipped",
        "FAILED",
        "INTERRUPTED",
        "not run",
    ]
    assert "- ctest: C++ tests: no Catch2\n" in output
    kept = {row.name for row in results_file.load(rows)[1]}
    first_log = (rehearsal.logs / "bench-micro.log").read_text()
    assert "pretended failure of pytest" in (rehearsal.logs / "pytest.log").read_text()
    rehearsal.take_calls()

    rehearsal.behave()
    status, output = rehearsal.run("--resume")
    assert status == 0, output
    calls = rehearsal.take_calls()
    assert kinds(calls)[1:7] == [
        "--package",
        "--gpu-tests",
        "pytest",
        "bench-micro-rows.json",
        "bench-steps-rows.json",
        "memcheck",
    ]
    assert kinds(calls)[-1] == "benchmarks.report"
    measured = [call["row"] for call in calls if "row" in call]
    assert "cuda: unscale_, 1000 x 16" in measured
    assert not kept & set(measured)
    assert (rehearsal.logs / "bench-micro.log").read_text().startswith(first_log)
    assert rehearsal.statuses() == {**dict.fromkeys(NAMES, "passed"), "ctest": "skipped"}

    status, output = rehearsal.run("--resume", "--stage", "pytest")
    assert (status, len(rehearsal.take_calls())) == (0, 1)
    assert "passed before: pytest\n" in output


def test_without_a_build_nothing_else_runs(rehearsal):
    rehearsal.behave(fail=["--package"])
    status, output = rehearsal.run()
    assert status == 1
    assert rehearsal.statuses() == {**dict.fromkeys(NAMES, "skipped"), "build": "FAILED"}
    assert kinds(rehearsal.take_calls())[1:] == ["--package"]
    assert "13 stages, 1 failed: build" in output


def test_what_fails_keeps_nothing_else_from_running(rehearsal):
    rehearsal.behave(fail=["--gpu-tests", "racecheck"])
    words = [word for name in NAMES if "bench" not in name for word in ("--stage", name)]
    status, output = rehearsal.run(*words)
    assert status == 1
    assert "8 stages, 2 failed: build-rest, racecheck" in output
    statuses = rehearsal.statuses()
    assert (statuses["ctest"], statuses["graphs"], statuses["report"]) == (
        "passed",
        "passed",
        "skipped",
    )
    assert "pretended failure of racecheck" in (rehearsal.logs / "racecheck.log").read_text()
