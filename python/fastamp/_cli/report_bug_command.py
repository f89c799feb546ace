# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp report-bug``: a failed run as one file, for an issue of any project."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

from fastamp._cli import info_command, run_command
from fastamp._cli.check_command import check_program
from fastamp._cli.closed_pipe import ends_with_its_reader
from fastamp._cli.output_file import OutputFile
from fastamp._debug.check.rules import Findings
from fastamp._debug.report import json_of, today
from fastamp._debug.watch.origins import short_path
from fastamp._install.installation import install

_EPILOG = """\
PROGRAM is a script, -m MODULE or -c CODE. It is run for some training steps as check does it, or
until it fails. The file says where it failed, what check found, versions and devices. It holds no
arguments of the program, no environment but fastamp's, no source and no values of tensors; paths
are those within the current folder and within packages. Read it before you send it: names of
modules, and messages of errors, are the program's own. The exit status is 0 if the file was
written, whatever the program did, and 2 if the arguments make no sense.
"""
_MOST_OF_A_MESSAGE = 400


def main(arguments: list[str]) -> None:
    """Runs the command; always ends in SystemExit."""
    options = _parser().parse_args(arguments)
    try:
        output = OutputFile(options.output)
    except OSError as error:
        _refuse(f"--output: {error}")
    if output.path is not None and output.path.exists():
        _refuse(f"expected --output FILE that is not there yet, got {_name(output, options)}")
    found = _run(options.program, options.steps) if options.program else {}
    for title, facts in info_command.facts(probe=False).items():
        found[title] = [f"{name}: {_without_home(value)}" for name, value in facts.items()]
    with ends_with_its_reader():
        try:
            output.put_text(f"{_text_of(found, Path(options.output).suffix)}\n")
        except BrokenPipeError:
            raise
        except OSError as error:
            _refuse(str(error))
        if output.path is not None:
            name = _name(output, options)
            print(f"fastamp: the report is in {name}; read it before you send it")
    sys.exit(0)


def _name(output: OutputFile, options: argparse.Namespace) -> str:
    """The file as the user has named it, with the rank of this process."""
    path = Path(options.output)
    return str(path.with_name(output.path.name) if output.path is not None else path)


def _text_of(found: dict[str, list[str]], suffix: str) -> str:
    if suffix == ".json":
        return json_of("report-bug", {"date": today(), **found})
    parts = [f"# Report of a run on fastamp, {today()}"]
    for title, lines in found.items():
        parts += [f"## {title}", "\n".join(["```", *lines, "```"])]
    return "\n\n".join(parts)


def _run(program: list[str], steps: int) -> dict[str, list[str]]:
    install()
    findings, error = Findings(), None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        try:
            check_program(lambda: run_command.run_program(program), findings, steps)
        except BaseException as raised:
            error = raised
    kind = {"-m": "a module", "-c": "code", "-": "the standard input"}.get(program[0], "a script")
    texts = dict.fromkeys(f"{w.category.__name__}: {_message(str(w.message))}" for w in said)
    return {
        f"the run of {kind}": _ending_of(error).splitlines(),
        "what check found": str(findings.report(has_step=True)).splitlines(),
        "warnings": list(texts) or ["none"],
    }


def _ending_of(error: BaseException | None) -> str:
    """Describes how a program has ended: the places of an error, without the lines there."""
    if error is None:
        return "ended, or was ended after enough steps"
    if isinstance(error, SystemExit):
        return f"SystemExit: {type(error.code).__name__}"
    places = [
        f"  {short_path(frame.filename)}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen")
    ]
    return "\n".join([*places, f"{type(error).__name__}: {_message(str(error))}"])


def _message(text: str) -> str:
    """A message with paths shortened and without numbers in brackets, which may be values."""
    text = re.sub(r"(/[\w.+-]+)+", lambda found: short_path(found[0]), _without_home(text))
    text = re.sub(r"(tensor|array)\(.*?\)", r"\1(...)", text, flags=re.DOTALL)
    return text if len(text) <= _MOST_OF_A_MESSAGE else f"{text[:_MOST_OF_A_MESSAGE]} ..."


def _without_home(text: str) -> str:
    home = os.path.expanduser("~")  # noqa: PTH111 (as text)
    return text.replace(home, "~") if len(home) > 1 else text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastamp report-bug",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="fastamp-report.md",
        help="where to, as data if its name ends in .json (%(default)s); - prints it",
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="optimizer steps to look at; 0: to the end (3)"
    )
    parser.add_argument("program", metavar="PROGRAM", nargs=argparse.REMAINDER, help="what failed")
    return parser


def _refuse(text: str) -> NoReturn:
    sys.stderr.write(f"python -m fastamp report-bug: {text}\n")
    sys.exit(2)
