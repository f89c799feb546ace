# SPDX-License-Identifier: Apache-2.0
"""What tools/{kernel,step,float8,host}_mutants.py state of each break."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One break: a name, a text that occurs in the file once, and what it becomes.

    ``equivalent`` says why no test can notice it; empty where one must.
    """

    name: str
    old: str
    new: str
    equivalent: str = ""


@dataclass(frozen=True)
class Group:
    """Breaks of one file in src/kernels/cuda, the sources to compile and the tests to run."""

    file: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    changes: tuple[Change, ...]
