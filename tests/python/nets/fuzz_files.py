# SPDX-License-Identifier: Apache-2.0
"""Lets atheris look for input that a reader of nets.files mishandles.

PYTHONPATH=tests/python:tools python -m nets.fuzz_files policies --seconds 600

It follows which branches of fastamp's Python code run, and of TOML's parser. What it finds is
printed as a call of the reader and written to crash-* in the current folder; once mended, it goes
to tests/data/files, where nets/test_files.py runs it. Needs `pip install atheris`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris
import torch  # noqa: F401, not followed: it takes minutes to prepare

with atheris.instrument_imports(include=["fastamp", "tomllib"]):
    from nets.files import READERS, SEEDS


def main() -> None:
    """Ends with an error of the fuzzer if something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--seconds", type=int, default=600)
    options = parser.parse_args()
    read = READERS[options.reader]

    def run(data: bytes) -> None:
        try:
            read(data)
        except Exception:
            print(f"READERS[{options.reader!r}]({data!r})", file=sys.stderr)
            raise

    with tempfile.TemporaryDirectory() as found:
        folders = [found, str(Path(SEEDS, options.reader))]
        limits = [f"-max_total_time={options.seconds}", "-max_len=512", "-timeout=60"]
        atheris.Setup([sys.argv[0], *limits, *folders], run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
