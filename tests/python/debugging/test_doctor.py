# SPDX-License-Identifier: Apache-2.0
"""check names faults of programs, its advice cures them, and right programs are left alone."""

from __future__ import annotations

import contextlib
import warnings

import pytest

import fastamp
from debugging.doctor_programs import SICK, program
from debugging.healthy_programs import HEALTHY, LOOK_ALIKES
from fastamp._cli.check_command import check_program
from fastamp._debug.check.rules import RULES, CheckReport, Findings


def checked(text: str) -> CheckReport:
    """What check finds in a program; what the program raises is as if it had ended."""
    findings = Findings(())
    code = compile(text, "train.py", "exec")
    with fastamp.install(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with contextlib.suppress(AssertionError):  # "No inf checks were recorded": torch's words
            check_program(lambda: exec(code, {"__name__": "__main__"}), findings)
    assert not any("fault of fastamp" in str(each.message) for each in said), said[0].message
    return findings.report(has_step=True)


def rules_of(report: CheckReport) -> set[str]:
    return {finding.rule for finding in report.findings}


@pytest.mark.parametrize("name", SICK)
def test_a_fault_is_named_first_and_the_advice_cures_it(name):
    case = SICK[name]
    report = checked(case.text())
    # With the line that says which program it is, these are three.
    first = str(report).splitlines()[:2]
    assert case.rule in first, str(report)
    assert case.place in str(report), str(report)
    assert rules_of(report) <= {case.rule, *case.others}, str(report)
    cured = checked(case.cured())
    assert not cured, str(cured)


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_program_that_looks_like_it(name):
    report = checked(program(**HEALTHY[name]))
    assert not report, str(report)


def test_there_are_as_many_as_are_asked_for():
    assert len(SICK) >= 40
    assert len(HEALTHY) >= 25


def test_each_rule_has_a_program_with_the_fault_and_one_that_looks_like_it():
    named = {rule for case in SICK.values() for rule in (case.rule, *case.others)}
    assert named == RULES.keys()
    assert LOOK_ALIKES.keys() == RULES.keys()
    assert {name for names in LOOK_ALIKES.values() for name in names} <= HEALTHY.keys()
