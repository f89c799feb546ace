"""Runs Python in a child process, with fastamp importable and torch on the CPU level of this run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
_PACKAGE_PARENT = _TESTS.parents[1] / "python"


def run_python(
    *arguments: str, timeout: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``python *arguments`` and returns what it printed; does not check the exit code."""
    env = dict(os.environ)
    paths = [str(_TESTS), str(_PACKAGE_PARENT), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    env.update(environment)
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def check_python(*arguments: str, timeout: float = 240, **environment: str) -> str:
    """Runs ``python *arguments``, requires exit code 0, returns stdout."""
    done = run_python(*arguments, timeout=timeout, **environment)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
