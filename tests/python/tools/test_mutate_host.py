# SPDX-License-Identifier: Apache-2.0
"""The list of breaks of host code fits today's sources, and tables say what was not run."""

from __future__ import annotations

import pytest

import mutate_host
from mutate_host import MUTANTS, ROOT


def test_there_are_enough_and_no_two_have_one_name():
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_break_changes_today_s_source(mutant):
    assert mutant.text()  # or an error: the text to replace must occur once
    assert mutant.group.tests or mutant.group.program
    assert all((ROOT / test).is_file() for test in mutant.group.tests)


def test_a_changed_file_drops_its_result():
    first, second = MUTANTS[:2]
    results = {
        first.name: {"by": "simulated", "seen": "wrong", "digest": first.digest()},
        second.name: {"by": "simulated", "seen": "wrong", "digest": "of another file"},
    }
    table = mutate_host.table([first, second], results)
    assert f"| {first.change.name} | simulated | wrong |" in table
    assert table.endswith(f"Not run yet: 1\n- {second.name}")
