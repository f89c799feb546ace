# SPDX-License-Identifier: Apache-2.0
"""Runs Python in a child process, with fastamp importable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastamp
import warm_python
from patience import patience

_TESTS = Path(__file__).resolve().parents[1]
_TOOLS = _TESTS.parents[1] / "tools"


def child_environment(**changes: str) -> dict[str, str]:
    """Returns an environment in which children import the fastamp that is tested, and support."""
    package = str(Path(fastamp.__file__).resolve().parents[1])
    paths = [str(_TESTS), str(_TOOLS), package, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **changes}


def run_python(
    *arguments: str, timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``python *arguments`` and returns what it printed; does not check the exit code.

    Args:
        arguments: Of the interpreter.
        timeout: Seconds on two idle cores after which it counts as hanging.
        environment: Variables that are added to this process's.
    """
    return subprocess.run(
        [sys.executable, *arguments],
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        timeout=patience(timeout),
        check=False,
    )


def run_program(
    *arguments: str | os.PathLike[str],
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 600,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """As :func:`run_python`, for programs whose start-up is not what is tested.

    In `make test` they run in an interpreter that has imported torch already.

    Args:
        arguments: Of the interpreter, no options of its own among them.
        cwd: Where it is run; by default here.
        timeout: Seconds on two idle cores after which it counts as hanging.
        environment: Variables that are added to this process's.
    """
    words = [os.fspath(argument) for argument in arguments]
    variables, limit = child_environment(**environment), patience(timeout)
    if warm_python.can_run(words, variables):
        return warm_python.run(words, variables, os.fspath(cwd or Path.cwd()), limit)
    return subprocess.run(
        [sys.executable, *words],
        env=variables,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
        cwd=cwd,
    )


def check_python(*arguments: str, timeout: float = 600, **environment: str) -> str:
    """Runs ``python *arguments``, requires exit code 0, returns stdout."""
    return _checked(run_python(*arguments, timeout=timeout, **environment))


def check_program(*arguments: str | os.PathLike[str], **options: Any) -> str:
    """As :func:`run_program`; requires exit code 0, returns stdout."""
    return _checked(run_program(*arguments, **options))


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
