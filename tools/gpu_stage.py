# SPDX-License-Identifier: Apache-2.0
"""Runs the stages of `make gpu`: build, tests, sanitizers and benchmarks on a GPU.

Needs no network. build/gpu holds a log and an outcome of each stage and summary.md of all, up to
date at any moment. A stage that fails, is skipped or runs out of time does not keep the next from
running, but for the build. --resume goes on where a run was interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import gpu_record
import gpu_stages
from gpu_record import (
    CUT_OFF,
    FAILED,
    INTERRUPTED,
    PASSED,
    RUNNING,
    SKIPPED,
    TOO_LONG,
    Outcome,
    Record,
)
from gpu_stages import ROOT, STAGES, Plan, Stage
from run_tests import gpu_name

BAD = (FAILED, TOO_LONG, CUT_OFF, INTERRUPTED)
INTERRUPTED_STATUS = 130  # as a shell has it
GRACE_SECONDS = 10.0  # for a command to save what it has when it is ended


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stage", action="append", choices=names, help="only this; repeatable")
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "make")
    parser.add_argument("--list", action="store_true", help="only name the stages")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="leave out stages that passed, and rows that were measured, on this tree and GPU",
    )
    return parser.parse_args(arguments)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and what it started: it has a process group of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(GRACE_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)  # and what it left behind
    process.wait()


def _run(command: list[str], environment: dict[str, str], log: IO[bytes], seconds: float) -> int:
    """Returns the exit status.

    Raises:
        subprocess.TimeoutExpired: The command took longer than ``seconds`` and was ended.
        KeyboardInterrupt: This process was asked to end, and so was the command.
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
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            _end(process)
            raise


def _run_all(
    commands: list[list[str]], environment: dict[str, str], log: IO[bytes], seconds: float
) -> str:
    """Runs commands, those after a failure too; returns how that ended."""
    start, status = time.monotonic(), PASSED
    for command in commands:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        try:
            code = _run(command, environment, log, seconds - (time.monotonic() - start))
        except subprocess.TimeoutExpired:
            return TOO_LONG
        except KeyboardInterrupt:
            return INTERRUPTED
        except OSError as error:
            log.write(f"{error}\n".encode())
            code = 1
        if code != 0:
            status = FAILED
    return status


def _last_line(log: str) -> str:
    lines = (line.strip() for line in reversed(log.splitlines()))
    return next((line for line in lines if line), "printed nothing")


def _environment(stage: Stage, build_dir: Path) -> dict[str, str]:
    paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "FASTAMP_BUILD_DIR": str(build_dir),
        **dict(stage.environment),
    }


def _planned(stage: Stage, build_dir: Path, record: Record) -> Plan:
    for needed in map(record.outcome, stage.builds[:1]):
        if needed.status in BAD:
            return Plan(left_out=[f"stage {needed.stage}: {needed.status}"])
    return stage.plan(build_dir)


def run_stage(stage: Stage, build_dir: Path, record: Record, resume: bool = False) -> Outcome:
    """Runs a stage; the record says that it began, and how it ended.

    ``resume`` keeps the rows that it measured before, and its log.
    """
    log_path = record.folder / f"{stage.name}.log"
    if not resume:
        gpu_stages.rows_file(stage.name).unlink(missing_ok=True)
    plan = _planned(stage, build_dir, record)
    if not plan.commands:
        outcome = Outcome(stage.name, SKIPPED, 0.0, plan.left_out[0], plan.left_out)
        record.save(outcome)
        return outcome
    record.save(Outcome(stage.name, RUNNING, 0.0, f"its log: {log_path}", plan.left_out))
    start = time.monotonic()
    with log_path.open("ab" if resume else "wb") as log:
        begin = log.tell()
        seconds = 60 * stage.minutes
        status = _run_all(plan.commands, _environment(stage, build_dir), log, seconds)
    seconds = round(time.monotonic() - start, 1)
    text = log_path.read_bytes()[begin:].decode(errors="replace")
    left_out = list(dict.fromkeys([*plan.left_out, *gpu_record.left_out_lines(text)]))
    outcome = Outcome(stage.name, status, seconds, _last_line(text), left_out)
    record.save(outcome)
    return outcome


def print_plan(stages: list[Stage], build_dir: Path, commands: bool) -> None:
    """Prints the stages, and their commands."""
    for stage in stages:
        print(f"{stage.name:15}{stage.minutes:5.1f} min  {stage.text}")
        if commands:
            plan = stage.plan(build_dir)
            variables = [f"{name}={value}" for name, value in stage.environment]
            for command in plan.commands:
                print(f"    {shlex.join([*variables, *command])}")
            for text in plan.left_out:
                print(f"    left out: {text}")
    print(f"at most {sum(stage.minutes for stage in stages):.0f} minutes")


def chosen_stages(names: list[str] | None, record: Record, resume: bool) -> list[Stage]:
    """Returns the stages to run: all, or those named; with ``resume`` not those that passed.

    They come with those that build what they run: a run may go on on another machine.
    """
    found: list[Stage] = []
    for stage in STAGES:
        passed = resume and record.outcome(stage.name).status == PASSED
        stale = any(one.name in stage.reads for one in found)
        if (not names or stage.name in names) and (stale or not passed):
            found.append(stage)
    builds = {name for stage in found for name in stage.builds}
    return [stage for stage in STAGES if stage in found or stage.name in builds]


def _open_record(options: argparse.Namespace, gpu: str) -> Record:
    identity = gpu_record.identify(ROOT, gpu)
    names = [stage.name for stage in STAGES]
    record = Record(gpu_stages.FOLDER, identity, names, options.resume or bool(options.stage))
    print(f"GPU: {gpu}; logs, outcomes and summary.md: {record.folder}", flush=True)
    if options.resume and record.why:
        print(f"nothing to resume: {record.why}; all stages run", flush=True)
    return record


def _run_stages(stages: list[Stage], build_dir: Path, record: Record, resume: bool) -> bool:
    """Returns whether all were run: not after an interruption."""
    try:
        for stage in stages:
            print(f"{stage.name:15}{stage.text}", flush=True)
            outcome = run_stage(stage, build_dir, record, resume)
            print(f"{'':15}{outcome.status}, {outcome.seconds:.0f} s: {outcome.last}", flush=True)
            if outcome.status == INTERRUPTED:
                return False
    except KeyboardInterrupt:  # between two commands
        record.mark_running(INTERRUPTED)
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if no stage failed, and 130 if the run was interrupted."""
    options = parse(arguments)
    build_dir = options.build_dir.resolve()
    named = [stage for stage in STAGES if not options.stage or stage.name in options.stage]
    if options.list or options.dry_run:
        print_plan(named, build_dir, options.dry_run)
        return 0
    gpu = gpu_name()
    if not gpu:
        raise SystemExit("no CUDA GPU here: nothing was tested")
    # Also where a shell made this process ignore them, as it does in the background.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    record = _open_record(options, gpu)
    stages = chosen_stages(options.stage, record, options.resume)
    earlier = [stage.name for stage in named if stage not in stages]
    if earlier:
        print(f"passed before: {', '.join(earlier)}", flush=True)
    finished = _run_stages(stages, build_dir, record, options.resume)
    print(f"\n{record.summary()}")
    names = dict.fromkeys(stage.name for stage in [*named, *stages])
    bad = [name for name in names if record.outcome(name).status in BAD]
    print(f"{len(names)} stages, {len(bad)} failed{': ' * bool(bad)}{', '.join(bad)}")
    if not finished:
        print("interrupted; to go on: make gpu RESUME=1, or this command with --resume")
        return INTERRUPTED_STATUS
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
