# SPDX-License-Identifier: Apache-2.0
"""The command line: runs other programs on fastamp, and reports on it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import NoReturn

from fastamp._cli import (
    bisect_command,
    check_command,
    compare_command,
    export_command,
    float8_command,
    fuse_command,
    info_command,
    inspect_command,
    log_command,
    merge_command,
    ops_command,
    report_bug_command,
    report_command,
    run_command,
)
from fastamp._cli.closed_pipe import ends_with_its_reader
from fastamp._install import guarded_optimizers, program_policies
from fastamp._install.installation import install

USAGE = """\
usage: python -m fastamp SCRIPT [ARGUMENT ...]      run a script on fastamp, as python would
       python -m fastamp -m MODULE [ARGUMENT ...]   the same with a module
       python -m fastamp -c CODE [ARGUMENT ...]     the same with code
       python -m fastamp - [ARGUMENT ...]           the same with the standard input
       python -m fastamp [OPTION ...] PROGRAM       run any of those
           --report FILE                            at the end, write what autocast did: a page if
                                                    FILE ends in .html, JSON in .json, - prints it
           --policy FILE                            ops and modules run under this policy file
                                                    (docs/policies.md)
           --inspect FILE                           one training step, op by op: a page if FILE ends
                                                    in .html, JSON in .json, - prints tables
           --at-step N                              which step that is, from 0 (docs/debugging.md)
           --record FILE                            one training step, for compare; --at-step too
           --guard                                  steps of optimizers whose gradients are inf or
                                                    NaN are skipped (docs/guard.md)
           --at-first-skip                          the first step that the gradient scaler skips;
                                                    inspects all until then, from N on
           --at-first-nonfinite                     the first step with inf or NaN in its gradients,
                                                    skipped or not
           --log-to PLACE                           scale, norm and overflows of each step: a row in
                                                    PLACE if that ends in .jsonl, - prints it, else
                                                    TensorBoard's
           --fuse                                   SGD, Adam, AdamW and Muon of torch take
                                                    fastamp's steps (docs/optim.md)
           --float8                                 bfloat16 regions run linear layers in fp8, on
                                                    the CPU slowly (docs/float8.md)
           --float8-exclude NAME                    but not those of modules or parameters of this
                                                    name, such as lm_head or 'layers.0.*'; may be
                                                    given several times
       python -m fastamp check [OPTION ...] PROGRAM
                                                    looks for common mistakes; see check --help
       python -m fastamp compare FIRST SECOND       where two runs part, by their records
       python -m fastamp bisect MODULE:FUNCTION [--help]
                                                    which ops have to run in fp32
       python -m fastamp merge FILE ...             overflow reports of several ranks as one
       python -m fastamp info                       versions, devices, what is installed
       python -m fastamp ops [--device {cpu,cuda}] [NAME]
                                                    what autocast does with each op
       python -m fastamp export MODULE:CALLABLE FILE [--help]
                                                    export a model in 16 bits (docs/inference.md)
       python -m fastamp report-bug [OPTION ...] [PROGRAM]
                                                    one file for an issue: versions, and how a
                                                    program failed, without its data
       python -m fastamp --version | --help

A script that is called `bisect`, `check`, `compare`, `export`, `info`, `merge`, `ops` or
`report-bug` runs as ./check and so on. docs/commands.md lists the exit statuses, and what --json
writes.
"""


def _help(arguments: list[str]) -> None:  # noqa: ARG001
    print(USAGE, end="")


def _version(arguments: list[str]) -> None:  # noqa: ARG001
    from fastamp import __version__

    print(f"fastamp {__version__}")


def _printing(command: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """A command that runs nothing of the user's, and may end with the reader of its output."""

    def run_it(arguments: list[str]) -> None:
        with ends_with_its_reader():
            command(arguments)

    return run_it


_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "--help": _printing(_help),
    "-h": _printing(_help),
    "--version": _printing(_version),
    "bisect": bisect_command.main,
    "check": check_command.main,
    "compare": _printing(compare_command.main),
    "merge": _printing(merge_command.main),
    "info": _printing(info_command.main),
    "ops": _printing(ops_command.main),
    "export": export_command.main,
    "report-bug": report_bug_command.main,
    "-m": run_command.run_module,
    "-c": run_command.run_code,
    "-": run_command.run_standard_input,
}


#: What follows each option.
_OPTIONS = {
    "--report": "FILE",
    "--policy": "FILE",
    "--inspect": "FILE",
    "--record": "FILE",
    "--at-step": "N",
    "--guard": "",
    "--at-first-skip": "",
    "--at-first-nonfinite": "",
    "--log-to": "PLACE",
    "--fuse": "",
    "--float8": "",
    "--float8-exclude": "NAME",
}


#: Options without a value: the attribute that they set, and to what.
_FLAGS: dict[str, tuple[str, bool | str]] = {
    "--at-first-skip": ("first", "skip"),
    "--at-first-nonfinite": ("first", "nonfinite"),
    "--fuse": ("fuse", True),
    "--guard": ("guard", True),
    "--float8": ("float8", True),
}

_running: list[ExitStack] = []


@dataclasses.dataclass
class _Options:
    report: str | None = None
    policy: str | None = None
    inspect: str | None = None
    record: str | None = None
    at_step: int | None = None
    guard: bool = False
    first: str | None = None
    log_to: str | None = None
    fuse: bool = False
    float8: bool = False
    exclude: list[str] = dataclasses.field(default_factory=list)

    def start(self, program: str) -> None:
        """Puts them in force for the rest of the process, for a program of this name."""
        if self.report is not None:
            install()  # the trace is of fastamp's kernels
            try:
                report_command.start(self.report)
            except OSError as error:
                _refuse(f"--report: {error}", usage=False)
        if self.policy is not None:
            try:
                program_policies.start(self.policy)
            except (OSError, ValueError) as error:
                _refuse(f"--policy: {error}", usage=False)
        if self.inspect is not None:
            install()
            try:
                inspect_command.start(self.inspect, self.at_step or 0, self.first, program)
            except OSError as error:
                _refuse(f"--inspect: {error}", usage=False)
        if self.record is not None:
            try:
                inspect_command.start_record(self.record, self.at_step or 0)
            except OSError as error:
                _refuse(f"--record: {error}", usage=False)
        if self.guard:
            _running.append(guarded_optimizers.start())
        if self.log_to is not None:
            install()
            try:
                log_command.start(self.log_to)
            except (ImportError, OSError) as error:
                _refuse(f"--log-to: {error}", usage=False)
        if self.fuse:
            fuse_command.start()
        if self.float8:
            float8_command.start(self.exclude)


def _refuse(text: str, usage: bool = True) -> NoReturn:
    sys.stderr.write(f"{USAGE if usage else ''}python -m fastamp: {text}\n")
    sys.exit(2)


def _read_options(arguments: list[str]) -> tuple[_Options, list[str]]:
    """Returns the options before the program, and the program with its arguments."""
    options = _Options()
    while arguments and arguments[0] in _OPTIONS:
        name, *arguments = arguments
        if name in _FLAGS:
            attribute, flag = _FLAGS[name]
            setattr(options, attribute, flag)
            continue
        if len(arguments) < 2:
            _refuse(f"expected {name} {_OPTIONS[name]} and a program")
        value, *arguments = arguments
        if name == "--report":
            options.report = value
        elif name == "--policy":
            options.policy = value
        elif name == "--inspect":
            options.inspect = value
        elif name == "--record":
            options.record = value
        elif name == "--log-to":
            options.log_to = value
        elif name == "--at-step":
            if not value.isdecimal():
                _refuse(f"expected --at-step with a number, at least 0, got {value!r}")
            options.at_step = int(value)
        else:
            options.exclude.append(value)
    if options.inspect is not None and options.record is not None:
        _refuse("expected one of --inspect and --record, got both")
    if options.first and options.inspect is None:
        _refuse(f"expected --inspect FILE with --at-first-{options.first}, got none")
    if options.at_step is not None and options.inspect is None and options.record is None:
        _refuse("expected --inspect FILE with --at-step, got none, nor --record FILE")
    if options.exclude and not options.float8:
        _refuse("expected --float8 with --float8-exclude, got none")
    if not all(options.exclude):
        _refuse("expected --float8-exclude with a name, got an empty one")
    return options, arguments


def main() -> None:
    """Runs the command in ``sys.argv``; an exit code is raised as SystemExit."""
    options, arguments = _read_options(sys.argv[1:])
    if not arguments:
        sys.stderr.write(USAGE)
        sys.exit(2)
    options.start(arguments[1] if arguments[0] == "-m" and arguments[1:] else arguments[0])
    command = _COMMANDS.get(arguments[0])
    if command is not None:
        command(arguments[1:])
    elif arguments[0].startswith("-"):
        _refuse(f"unknown option {arguments[0]}")
    else:
        run_command.run_script(arguments)
