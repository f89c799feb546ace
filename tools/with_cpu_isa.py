# SPDX-License-Identifier: Apache-2.0
"""Runs a command with ONEDNN_MAX_CPU_ISA set to the best level that this CPU survives.

with_cpu_isa.py --cache build/cpu_isa.json -- command ...
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def load_probe() -> ModuleType:
    """Loads fastamp._util.cpu_isa by its path: importing the package would import torch (2 s)."""
    path = ROOT / "python" / "fastamp" / "_util/cpu_isa.py"
    spec = importlib.util.spec_from_file_location("cpu_isa", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Replaces this process by the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="file that keeps the answer")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and what to run")
    options = parser.parse_args()
    probe = load_probe()
    level = probe.best_level(options.cache)
    if level and probe.VARIABLE not in os.environ:
        print(f"{probe.VARIABLE}={level}: oneDNN's own choice crashes on this CPU", flush=True)
        os.environ[probe.VARIABLE] = level
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    os.execvp(command[0], command)


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(f"fastamp: {error}")
