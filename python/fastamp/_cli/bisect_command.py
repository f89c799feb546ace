# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp bisect``: finds which ops of a step have to run in fp32."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from fastamp._cli.closed_pipe import ends_with_its_reader
from fastamp._cli.named_function import call_named
from fastamp._cli.output_file import OutputFile
from fastamp._debug.bisect import bisect

_EPILOG = """\
FUNCTION takes nothing and returns a step and the model: the step, a function without arguments,
runs one batch forward in an autocast region and backward, without the optimizer's step. The module
is imported as `python -m` would, from the current folder too. The exit status is 0 if the gradients
agree as they are, 1 if ops have to run in fp32, 2 if that cannot be found out.
"""


def main(arguments: list[str]) -> None:
    """Runs the command; always ends in SystemExit, or in what the step raises."""
    options = _parser().parse_args(arguments)
    try:
        policy, json = (file and OutputFile(file) for file in (options.policy, options.json))
    except OSError as error:
        _refuse(str(error))
    made = call_named(options.step, lambda text, _: _refuse(text))
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], torch.nn.Module):
        _refuse(f"expected {options.step} to return a step and a model, got {made!r}")
    try:
        report = bisect(made[0], made[1], agree=options.agree, max_runs=options.max_runs)
    except (RuntimeError, TypeError, ValueError) as error:
        if not str(error).startswith("bisect: "):
            raise
        _refuse(str(error).removeprefix("bisect: "))
    with ends_with_its_reader():
        # What other programs read is alone on the standard output.
        if any(file and file.path is None for file in (policy, json)):
            print(report, file=sys.stderr)
        else:
            report.print()
        try:
            if policy:
                policy.put_text(report.policy_text())
            if json:
                json.put_text(f"{report.to_json()}\n")
        except BrokenPipeError:
            raise
        except OSError as error:
            _refuse(str(error))
    sys.exit(1 if report else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastamp bisect",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("step", metavar="MODULE:FUNCTION", help="what makes the step and the model")
    parser.add_argument(
        "--agree", type=float, default=0.999, help="agreement of gradients to reach (%(default)s)"
    )
    parser.add_argument(
        "--max-runs", type=int, default=40, help="runs of the step at most (%(default)s)"
    )
    parser.add_argument("--policy", metavar="FILE", help="write the policy file; - prints it")
    parser.add_argument("--json", metavar="FILE", help="write what was found as data; - prints it")
    return parser


def _refuse(text: str) -> Any:
    sys.stderr.write(f"python -m fastamp bisect: {text}\n")
    sys.exit(2)
