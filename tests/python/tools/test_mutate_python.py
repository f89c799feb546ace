# SPDX-License-Identifier: Apache-2.0
"""The breaks of Python sources that tools/mutate_python.py tries, and the tests that it runs."""

from __future__ import annotations

import random

import mutate_python
from python_mutations import mutations

SOURCE = '''\
"""Text."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os


def f(a: int = 1, *, on: bool = True) -> int:
    """Text, 3 < 4."""
    if a < 2 and not on:
        raise ValueError(f"{a + 1}")
    g(a)
    return a * 3
'''


def test_the_breaks_of_a_source():
    found = [(m.line, m.old, m.new) for m in mutations(SOURCE)]
    assert found == [
        (8, "1", "(2)"),
        (8, "True", "(False)"),
        (10, "2", "(3)"),
        (10, "a < 2", "(a <= 2)"),
        (10, "a < 2 and not on", "(a < 2 or not on)"),
        (10, "a < 2 and not on", "False"),
        (10, "a < 2 and not on", "True"),
        (10, "not on", "(on)"),
        (11, 'raise ValueError(f"{a + 1}")', "pass"),
        (12, "g(a)", "pass"),
        (13, "3", "(4)"),
        (13, "a * 3", "(a / 3)"),
        (13, "a * 3", "None"),
    ]


def test_every_break_of_the_scaler_compiles_and_has_a_name_of_its_own():
    mutants = mutate_python.all_mutants("checks")
    assert len(mutants) > 100
    for mutant in random.Random(0).sample(mutants, 30):
        compile(mutant.mutation.source, mutant.file, "exec")
    assert len({mutant.digest() for mutant in mutants}) == len(mutants)


def test_tests_are_those_that_run_the_line_and_the_quickest_first():
    mutant = mutate_python.all_mutants("checks")[0]
    at = f"{mutant.file}:{mutant.mutation.line}"
    traced = {"slow": (2.0, [at]), "other": (0.1, ["state.py:1"]), "quick": (1.0, [at])}
    assert mutate_python.tests_of(mutant, traced) == ["quick", "slow"]
    assert mutate_python.tests_of(mutant, {"other": (0.1, ["state.py:1"])}) == []


def test_the_summary_names_what_nobody_noticed():
    first, second = mutate_python.all_mutants("checks")[:2]
    results = {first.digest(): {"is": "killed"}, second.digest(): {"is": "survives"}}
    text = mutate_python.summary([first, second], results)
    assert text == f"- survives: {second.name}\n2 of 2 run, 1 noticed"
