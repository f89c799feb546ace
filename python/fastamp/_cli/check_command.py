# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp check``: looks for the common mistakes in a program as it is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from fastamp._cli import run_command
from fastamp._cli.closed_pipe import (
    ends_with_its_reader,
    flush_output,
    forget_output,
    shows_any_text,
)
from fastamp._cli.output_file import OutputFile, print_report, rank_of_process
from fastamp._cli.watched_program import EnoughSteps, WatchedProgram, enough_steps
from fastamp._debug.check import RULES, run_checked
from fastamp._debug.check.model_rules import look_at_models
from fastamp._debug.check.rules import Findings, checked_ignore
from fastamp._debug.report import json_of
from fastamp._debug.watch.modules import ModulePath
from fastamp._install.installation import install
from fastamp._util.tool_guard import ToolGuard

USAGE = """\
usage: python -m fastamp check [OPTION ...] PROGRAM [ARGUMENT ...]
           runs a script, -m MODULE or -c CODE for some training steps and lists mistakes; the exit
           status is 1 if there are any
           --steps N        optimizer steps to look at (3); 0: until the program ends
           --ignore RULE    leaves a rule out; may be given several times
           --json FILE      writes the findings there as well; - prints them,
                            and the text to the standard error
       python -m fastamp check --list [--json FILE]
           the rules, why, and what to do; as data as well, or alone with -
"""


def main(arguments: list[str]) -> None:
    """Runs the command; always ends in SystemExit, or in what the program raises."""
    options, program = _read_options(arguments)
    file = options.get("--json", [None])[-1]
    if "--list" in options:
        with ends_with_its_reader():
            _list_rules(file)
        sys.exit(0)
    steps = _number(options.get("--steps", ["3"])[-1])
    try:
        findings = Findings(checked_ignore(options.get("--ignore", [])))
    except ValueError as error:
        _refuse(str(error).removeprefix("check: "))
    try:
        output = None if file is None else OutputFile(file)
    except OSError as error:
        _refuse(f"--json: {error}")
    sys.exit(_check(program, findings, steps, output))


def check_program(run_it: Callable[[], Any], findings: Findings, steps: int = 0) -> WatchedProgram:
    """Applies the rules to what a function trains.

    Args:
        run_it: Called once; ended by :class:`EnoughSteps` after that many optimizer steps.
        findings: Where findings go, also if the function raises.
        steps: 0: until it returns.

    Returns:
        What was found of the program.
    """
    path_here: Callable[[], ModulePath] | None = None
    guard = ToolGuard("fastamp check")

    def at_forward(model: torch.nn.Module) -> None:
        if steps and watched.steps >= steps:
            raise enough_steps()
        if path_here is not None and not (path := path_here()).knows(model):
            path.add(model, running=True)

    watched = WatchedProgram(at_forward, guard)
    scalers, optimizers, names = watched.scalers, watched.optimizers, watched.names
    try:
        with (
            watched.followed(),
            run_checked([], findings, scalers, optimizers, names, guard) as path_here,
            contextlib.suppress(EnoughSteps),
        ):
            run_it()
    finally:
        guard.run(look_at_models, watched.models, optimizers, names, findings)
    return watched


def _check(program: list[str], findings: Findings, steps: int, file: OutputFile | None) -> int:
    install()
    error: BaseException | None = None

    def run_it() -> None:
        nonlocal error
        try:
            run_command.run_program(program)
        except EnoughSteps:
            raise
        except BaseException as raised:  # Passed on after the findings were printed.
            if not isinstance(raised, SystemExit) or raised.code not in (None, 0):
                error = raised

    watched = check_program(run_it, findings, steps)
    report = findings.report(has_step=True)
    rank = rank_of_process()
    which = "" if rank is None else f" (rank {rank})"
    # Findings as data are alone on the standard output.
    stream = sys.stderr if file is not None and file.path is None else sys.stdout

    def show() -> None:
        flush_output()
        for text in report.advice:
            print(f"fastamp check: advice: {text}", file=stream)
        print(f"fastamp check: {_steps_of(watched)} of {program[0]}{which}", file=stream)
        print(report, file=stream, flush=True)

    def write() -> None:
        if file is not None:
            file.put_text(f"{report.to_json()}\n")

    for say in (show, write):
        try:
            with shows_any_text():
                say()
        except BrokenPipeError:
            forget_output()  # What the program raises, the file and the status stand all the same.
    if error is not None:
        raise error
    return 1 if report else 0


def _steps_of(watched: WatchedProgram) -> str:
    if not watched.steps:
        return "no optimizer step"
    said = f"{watched.steps} optimizer step{'' if watched.steps == 1 else 's'}"
    if watched.skipped:
        said += f" ({watched.skipped} skipped by the gradient scaler)"
    return said


def _read_options(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    given = " ".join(arguments)
    options: dict[str, list[str]] = {}
    while arguments and arguments[0] in ("--steps", "--ignore", "--json", "--list", "--help", "-h"):
        name, *arguments = arguments
        if name in ("--help", "-h"):
            with ends_with_its_reader():
                print(USAGE, end="")
            sys.exit(0)
        if name == "--list":
            options[name] = []
            continue
        if not arguments:
            _refuse(f"expected a value after {name}")
        value, *arguments = arguments
        options.setdefault(name, []).append(value)
    if "--list" in options:
        if arguments or options.keys() - {"--list", "--json"}:
            _refuse(f"expected --list with --json FILE or alone, got {given}")
        return options, []
    if not arguments:
        _refuse("expected a program, got none")
    if arguments[0].startswith("-") and arguments[0] not in ("-m", "-c", "-"):
        _refuse(f"unknown option {arguments[0]}")
    return options, arguments


def _number(text: str) -> int:
    if not text.isdecimal():
        _refuse(f"expected --steps with a number, at least 0, got {text!r}")
    return int(text)


def _list_rules(file: str | None) -> None:
    lines = []
    for rule in RULES.values():
        when = "" if rule.needs_step else "  (needs no step)"
        lines.append(f"{rule.name}{when}\n  why: {rule.reason}\n  fix: {rule.fix}")
    data = json_of("rules", {"rules": [rule._asdict() for rule in RULES.values()]})
    try:
        print_report("\n".join(lines), data, None if file is None else OutputFile(file))
    except BrokenPipeError:
        raise
    except OSError as error:
        _refuse(f"--json: {error}")


def _refuse(text: str) -> NoReturn:
    sys.stderr.write(f"{USAGE}python -m fastamp check: {text}\n")
    sys.exit(2)
