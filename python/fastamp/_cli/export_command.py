# SPDX-License-Identifier: Apache-2.0
"""``python -m fastamp export``: exports a model in the precision of an autocast region."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from fastamp._cli.closed_pipe import ends_with_its_reader
from fastamp._cli.named_function import call_named
from fastamp._cli.output_file import OutputFile
from fastamp._debug.report import json_of
from fastamp._inference.exporting import FORMATS, export

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

_EPILOG = """\
CALLABLE takes nothing and returns the model in eval mode and a tuple of its example inputs, or
these and a dict of those by name. The module is imported as `python -m` would, from the current
folder too.
"""


def main(arguments: list[str]) -> None:
    """Exports; the exit status is 1 if that cannot be done, 2 if the arguments make no sense."""
    options = _parser().parse_args(arguments)
    made = call_named(options.model, _refuse)
    model, args, *rest = made if isinstance(made, tuple) and len(made) in (2, 3) else (None, None)
    if not isinstance(model, torch.nn.Module):
        _refuse(f"expected {options.model} to return a model and a tuple of inputs, got {made!r}")
    target = options.format or ("onnx" if options.path.endswith(".onnx") else "ep")
    try:
        output = None if options.json is None else OutputFile(options.json)
        done = export(
            model,
            args,
            _DTYPES[options.dtype or ("float16" if target == "onnx" else "bfloat16")],
            lists=options.lists,
            kwargs=rest[0] if rest else None,
            path=options.path,
            format=target,
            keep_io_types=not options.lower_io_types,
            fp32=options.fp32,
            tolerance=options.tolerance,
            overwrite=options.overwrite,
            verbose=False,
        )
        with ends_with_its_reader():
            # Data are alone on the standard output.
            stream = sys.stderr if output is not None and output.path is None else sys.stdout
            print(*(f"export: {line}" for line in str(done).splitlines()), sep="\n", file=stream)
            if output is not None:
                data = {"path": options.path, "lines": str(done).splitlines()}
                output.put_text(f"{json_of('export', data)}\n")
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        _refuse(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastamp export",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODULE:CALLABLE", help="what makes the model")
    parser.add_argument("path", metavar="FILE", help=".pt2 or .onnx; must not be there yet")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="bfloat16; for onnx float16, as onnxruntime's CPU has few kernels in bfloat16",
    )
    parser.add_argument(
        "--lists", choices=("cuda", "cpu"), help="whose op lists it was trained with"
    )
    parser.add_argument("--format", choices=FORMATS, help="onnx if FILE ends so, else ep")
    parser.add_argument(
        "--fp32", metavar="NAME", action="append", default=[], help="modules to keep in float32"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="how far the runtime's results may be from the program's, relative to the largest "
        "magnitude of an output (0.0078 in float16, 0.0625 in bfloat16): kernels round in another "
        "order, which grows with a model's depth",
    )
    parser.add_argument("--json", metavar="FILE", help="write what was done as data; - prints it")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it is there")
    parser.add_argument(
        "--lower-io-types",
        action="store_true",
        help="take and return tensors of the dtype where the region would",
    )
    return parser


def _refuse(text: str, status: int = 1) -> Any:
    text = text.removeprefix("export: ")
    sys.stderr.write(f"python -m fastamp export: {text}\n")
    sys.exit(status)
