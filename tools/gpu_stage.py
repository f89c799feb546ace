# SPDX-License-Identifier: Apache-2.0
"""Runs the stages of `make gpu`, one by one or all: tests, sanitizers and benchmarks on a GPU.

Needs no network. Each stage leaves build/gpu/<stage>.log and build/gpu/<stage>.json as it ends; a
stage that fails or runs out of time does not keep the next from running.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from gpu_stages import FOLDER, ROOT, STAGES, Stage
from run_tests import gpu_name

PASSED, FAILED, SKIPPED, TOO_LONG = "passed", "FAILED", "skipped", "TOO LONG"


@dataclass
class Outcome:
    """How a stage ended; ``last`` is the last line it printed, or why it did not run."""

    stage: str
    status: str
    seconds: float
    last: str


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stage", action="append", choices=names, help="only this; repeatable")
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "make")
    parser.add_argument("--list", action="store_true", help="only name the stages")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    return parser.parse_args(arguments)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and what it started: it has a process group of its own."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _run(command: list[str], environment: dict[str, str], log: IO[bytes], seconds: float) -> int:
    """Returns the exit status.

    Raises:
        subprocess.TimeoutExpired: The command took longer than ``seconds`` and was ended.
    """
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(max(seconds, 0.001))
        except subprocess.TimeoutExpired:
            _end(process)
            raise
        except KeyboardInterrupt:
            _end(process)
            raise


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "printed nothing")


def run_stage(stage: Stage, build_dir: Path, folder: Path) -> Outcome:
    """Runs a stage's commands, those after a failure too, and writes down how it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    start, status = time.monotonic(), PASSED
    log_path = folder / f"{stage.name}.log"
    commands = stage.commands(build_dir)
    if isinstance(commands, str):
        outcome = Outcome(stage.name, SKIPPED, 0.0, commands)
    else:
        environment = dict(stage.environment)
        with log_path.open("wb") as log:
            for command in commands:
                log.write(f"$ {shlex.join(command)}\n".encode())
                log.flush()
                left = 60 * stage.minutes - (time.monotonic() - start)
                try:
                    code = _run(command, environment, log, left)
                except subprocess.TimeoutExpired:
                    status = TOO_LONG
                    break
                if code != 0:
                    status = FAILED
        seconds = round(time.monotonic() - start, 1)
        outcome = Outcome(stage.name, status, seconds, _last_line(log_path))
    text = json.dumps(asdict(outcome), indent=1) + "\n"
    (folder / f"{stage.name}.json").write_text(text, encoding="utf-8")
    return outcome


def print_plan(stages: list[Stage], build_dir: Path, commands: bool) -> None:
    """Prints the stages, and their commands."""
    for stage in stages:
        print(f"{stage.name:15}{stage.minutes:5.1f} min  {stage.text}")
        if commands:
            planned = stage.commands(build_dir)
            variables = [f"{name}={value}" for name, value in stage.environment]
            for command in [] if isinstance(planned, str) else planned:
                print(f"    {shlex.join([*variables, *command])}")
            if isinstance(planned, str):
                print(f"    skipped: {planned}")
    print(f"at most {sum(stage.minutes for stage in stages):.0f} minutes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if no stage failed."""
    options = parse(arguments)
    build_dir = options.build_dir.resolve()
    stages = [stage for stage in STAGES if not options.stage or stage.name in options.stage]
    if options.list or options.dry_run:
        print_plan(stages, build_dir, options.dry_run)
        return 0
    gpu = gpu_name()
    if not gpu:
        raise SystemExit("no CUDA GPU here: nothing was tested")
    print(f"GPU: {gpu}; logs and outcomes: {FOLDER}", flush=True)
    bad = 0
    for stage in stages:
        print(f"{stage.name:15}{stage.text}", flush=True)
        outcome = run_stage(stage, build_dir, FOLDER)
        bad += outcome.status in (FAILED, TOO_LONG)
        print(f"{'':15}{outcome.status}, {outcome.seconds:.0f} s: {outcome.last}", flush=True)
    print(f"{len(stages)} stages, {bad} failed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
