# SPDX-License-Identifier: Apache-2.0
"""The command line: runs other programs on fastamp, and reports on it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from fastamp._cli import info, ops, report, run
from fastamp._install import install

USAGE = """\
usage: python -m fastamp SCRIPT [ARGUMENT ...]      run a script on fastamp, as python would
       python -m fastamp -m MODULE [ARGUMENT ...]   the same with a module
       python -m fastamp -c CODE [ARGUMENT ...]     the same with code
       python -m fastamp - [ARGUMENT ...]           the same with the standard input
       python -m fastamp --report FILE PROGRAM      run any of those; at the end, write what
                                                    autocast did (JSON if FILE ends in .json)
       python -m fastamp info                       versions, devices, what is installed
       python -m fastamp ops [--device {cpu,cuda}] [NAME]
                                                    what autocast does with each op
       python -m fastamp --version | --help

A script that is called `info` or `ops` runs as ./info or ./ops.
"""


def _help(arguments: list[str]) -> None:  # noqa: ARG001
    print(USAGE, end="")


def _version(arguments: list[str]) -> None:  # noqa: ARG001
    from fastamp import __version__

    print(f"fastamp {__version__}")


_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "--help": _help,
    "-h": _help,
    "--version": _version,
    "info": info.main,
    "ops": ops.main,
    "-m": run.run_module,
    "-c": run.run_code,
    "-": run.run_standard_input,
}


def _start_report(arguments: list[str]) -> list[str]:
    """Starts the report that ``--report`` asks for; returns the program and its arguments."""
    if len(arguments) < 2:
        sys.stderr.write(f"{USAGE}python -m fastamp: expected --report FILE and a program\n")
        sys.exit(2)
    install()  # the trace is of fastamp's kernels
    try:
        report.start(arguments[0])
    except OSError as error:
        sys.stderr.write(f"python -m fastamp: --report: {error}\n")
        sys.exit(2)
    return arguments[1:]


def main() -> None:
    """Runs the command in ``sys.argv``; an exit code is raised as SystemExit."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--report"]:
        arguments = _start_report(arguments[1:])
    if not arguments:
        sys.stderr.write(USAGE)
        sys.exit(2)
    command = _COMMANDS.get(arguments[0])
    if command is not None:
        command(arguments[1:])
    elif arguments[0].startswith("-"):
        sys.stderr.write(f"{USAGE}python -m fastamp: unknown option {arguments[0]}\n")
        sys.exit(2)
    else:
        run.run_script(arguments)
