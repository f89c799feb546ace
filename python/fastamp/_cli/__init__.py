# SPDX-License-Identifier: Apache-2.0
"""The command line: runs other programs on fastamp, and reports on it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import NoReturn

from fastamp._cli import float8, info, ops, report, run
from fastamp._install import install

USAGE = """\
usage: python -m fastamp SCRIPT [ARGUMENT ...]      run a script on fastamp, as python would
       python -m fastamp -m MODULE [ARGUMENT ...]   the same with a module
       python -m fastamp -c CODE [ARGUMENT ...]     the same with code
       python -m fastamp - [ARGUMENT ...]           the same with the standard input
       python -m fastamp [OPTION ...] PROGRAM       run any of those
           --report FILE                            at the end, write what autocast did (JSON if
                                                    FILE ends in .json)
           --float8                                 bfloat16 regions run linear layers in fp8, on
                                                    the CPU slowly (docs/float8.md)
           --float8-exclude NAME                    but not those of modules or parameters of this
                                                    name, such as lm_head or 'layers.0.*'; may be
                                                    given several times
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


@dataclasses.dataclass
class _Options:
    report: str | None = None
    float8: bool = False
    exclude: list[str] = dataclasses.field(default_factory=list)

    def start(self) -> None:
        """Puts them in force for the rest of the process."""
        if self.report is not None:
            install()  # the trace is of fastamp's kernels
            try:
                report.start(self.report)
            except OSError as error:
                _refuse(f"--report: {error}", usage=False)
        if self.float8:
            float8.start(self.exclude)


def _refuse(text: str, usage: bool = True) -> NoReturn:
    sys.stderr.write(f"{USAGE if usage else ''}python -m fastamp: {text}\n")
    sys.exit(2)


def _read_options(arguments: list[str]) -> tuple[_Options, list[str]]:
    """Returns the options before the program, and the program with its arguments."""
    options = _Options()
    while arguments and arguments[0] in ("--report", "--float8", "--float8-exclude"):
        name, *arguments = arguments
        if name == "--float8":
            options.float8 = True
            continue
        if len(arguments) < 2:
            _refuse(f"expected {name} {'FILE' if name == '--report' else 'NAME'} and a program")
        value, *arguments = arguments
        if name == "--report":
            options.report = value
        else:
            options.exclude.append(value)
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
    options.start()
    command = _COMMANDS.get(arguments[0])
    if command is not None:
        command(arguments[1:])
    elif arguments[0].startswith("-"):
        _refuse(f"unknown option {arguments[0]}")
    else:
        run.run_script(arguments)
