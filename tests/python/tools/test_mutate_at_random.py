# SPDX-License-Identifier: Apache-2.0
"""The breaks that tools/mutate_at_random.py draws, their switches, and the tests that run."""

from __future__ import annotations

import io
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

import mutant_results
import mutant_tests
import mutate_at_random
import python_mutations
from mutant_control import Control
from mutations import switched
from tracked_files import ROOT

PYTHON = '''\
"""Text."""
from __future__ import annotations
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

CPP = """\
#include <x.h>
constexpr int kOne = 1;
static_assert(kOne > 0);
bool f(int a, bool c) {
  TORCH_CHECK(a > 1, "x", a + 1);
  for (int i = a; c;) {
    if (is(i)) {
      continue;
    }
    list.reserve(i);
    std::array<int, 3> v;
    a = c ? a * b : -b;
  }
  if constexpr (sizeof(a) == 4) {
    throw Error("a", 1);
  }
  return g(true);
}
"""


def test_the_breaks_of_a_python_source():
    found = [(m.line, m.old, m.new) for m in python_mutations.mutations(PYTHON)]
    assert found == [
        (9, "1", "(2)"),
        (9, "True", "(False)"),
        (11, "2", "(3)"),
        (11, "a < 2", "(a <= 2)"),
        (11, "a < 2 and not on", "(a < 2 or not on)"),
        (11, "a < 2 and not on", "False"),
        (11, "a < 2 and not on", "True"),
        (11, "not on", "(on)"),
        (12, 'raise ValueError(f"{a + 1}")', "pass"),
        (13, "g(a)", "pass"),
        (14, "3", "(4)"),
        (14, "a * 3", "(a / 3)"),
        (14, "a * 3", "None"),
    ]


def call_with(number: int, *arguments: object, **options: object) -> object:
    """What f of PYTHON does with one of its breaks, or none; ``[...]`` is what g was given."""
    changes = dict(enumerate(python_mutations.mutations(PYTHON), 1))
    text = python_mutations.with_switch(switched(PYTHON, changes))
    assert text.count("\n") == PYTHON.count("\n")
    given: list[object] = []
    names = {"g": given.append}
    switch = types.SimpleNamespace(is_on=lambda asked: asked == number)
    sys.modules["fastamp_mutants"] = switch
    try:
        exec(compile(text, "f", "exec"), names)
        return names["f"](*arguments, **options), given
    except ValueError as error:
        return str(error)
    finally:
        del sys.modules["fastamp_mutants"]


def test_a_number_chooses_one_break():
    assert call_with(0) == (3, [1])
    assert call_with(1) == (6, [2])  # the default
    assert call_with(0, 1, on=False) == "2"
    assert call_with(2, 1) == "2"
    assert call_with(4, 2, on=False) == "3"
    assert call_with(5, 5, on=False) == "6"
    assert call_with(6, 1, on=False) == (3, [1])
    assert call_with(9, 1, on=False) == (3, [1])
    assert call_with(10) == (3, [])
    assert call_with(11) == (4, [1])
    assert call_with(13) == (None, [1])


def test_the_breaks_of_a_cpp_source():
    cpp_mutations = pytest.importorskip("cpp_mutations", exc_type=ImportError)
    found = [(m.line, m.old, m.new) for m in cpp_mutations.mutations(CPP)]
    assert found == [
        (5, 'TORCH_CHECK(a > 1, "x", a + 1);', ""),
        (5, "a > 1", "a >= 1"),
        (5, "1", "1 + 1"),
        (7, "is(i)", "false"),
        (7, "is(i)", "true"),
        (8, "continue;", ""),
        (12, "a = c ? a * b : -b;", ""),
        (12, "c", "false"),
        (12, "c", "true"),
        (12, "a * b", "a / b"),
        (12, "-b", "b"),
        (15, 'throw Error("a", 1);', ""),
        (17, "g(true)", "!(g(true))"),
        (17, "true", "false"),
    ]
    one = cpp_mutations.mutations(CPP)[1]
    text = cpp_mutations.with_switch(switched(CPP, {3: one}), "switch.h", "a.cpp")
    assert text == '#include "switch.h"\n#line 1 "a.cpp"\n' + CPP.replace(
        "a > 1", "(fastamp_mutants::is_on(3) ? (a >= 1) : (a > 1))"
    )


def test_every_break_of_the_python_scaler_compiles():
    files = mutate_at_random.PYTHON_FILES
    every = mutate_at_random.drawn(files, python_mutations.mutations, 10**6, 0)
    assert len(every) > 1000
    assert len({mutant.key for mutant in every}) == len(every)
    for file, text in mutate_at_random.switched_texts(every).items():
        compile(python_mutations.with_switch(text), file, "exec")


def test_a_seed_draws_the_same_breaks_and_all_files_are_there():
    files = mutate_at_random.PYTHON_FILES
    first, again, other = (
        [m.name for m in mutate_at_random.drawn(files, python_mutations.mutations, 20, seed)]
        for seed in (0, 0, 1)
    )
    assert first == again != other
    assert all(file.is_file() for file in mutate_at_random.CPP_FILES)
    assert all((ROOT / test).exists() for test in mutant_tests.tests_for(["src/autocast/x.cpp"]))


def test_an_edit_leaves_what_is_drawn_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(mutate_at_random, "ROOT", tmp_path)
    file = tmp_path / "a.py"

    def draws():
        every = mutate_at_random.drawn([file], python_mutations.mutations, 12, 0)
        places = [(m.mutation.line, m.mutation.old, m.mutation.new) for m in every]
        return places, {m.key for m in every}

    body = "".join(f"def f{n}(a):\n    return a > {n} and a + {n} < 40\n" for n in range(30))
    file.write_text(body)
    places, keys = draws()
    file.write_text(f"# A line more.\n{body}")
    places_after, keys_after = draws()
    assert len(places) == 12
    assert places_after == [(line + 1, old, new) for line, old, new in places]
    assert keys_after.isdisjoint(keys)  # Results are of the whole file.


def test_what_the_compiler_refuses_is_found_by_its_line():
    mutants = mutate_at_random.drawn(
        mutate_at_random.PYTHON_FILES, python_mutations.mutations, 9, 0
    )
    wrong = mutants[4]
    error = f"{ROOT / wrong.file}:{wrong.mutation.last}:7: error: no match\n"
    assert wrong in mutate_at_random.refused(error, mutants)
    assert mutate_at_random.refused(f"{ROOT / wrong.file}:1:1: error: x", mutants) == []


def test_which_mutants_were_asked_for_is_told_once(tmp_path):
    control, other = Control(tmp_path / "control", 300), Control(tmp_path / "control", 300)
    names: dict[str, object] = {}
    exec(python_mutations.switch_module(str(tmp_path / "control")), names)
    is_on = names["is_on"]
    control.choose(257)
    assert [is_on(number) for number in (1, 257, 300)] == [False, True, False]
    assert other.take_reached() == {1, 257, 300}
    assert control.take_reached() == set()


def a_test(name: str, cost: float, *reached: int) -> mutant_tests.Test:
    return mutant_tests.Test(name, "", True, cost, reached)


def test_tests_of_autocast_are_run_for_its_mutants_only():
    folder = "tests/python/autocast"
    assert folder in mutant_tests.tests_for(["src/scaler/x.cpp", "src/autocast/y.cpp"])
    assert folder not in mutant_tests.tests_for(["src/scaler/x.cpp"])


def test_tests_of_a_file_stay_together_and_the_quickest_file_is_first():
    slow, quick, other = (a_test(*of) for of in (("a::x", 3), ("b::x", 1), ("a::y", 0.1)))
    assert mutant_tests.by_files([slow, quick, other], 60) == [quick, slow, other]
    assert mutant_tests.by_files([slow, quick, other], 2) == [quick]
    assert mutant_tests.by_files([slow], 2) == [slow]


def test_tests_that_reach_little_else_are_run_first():
    broad, narrow = a_test("a::x", 0.1, 1, 2, 3), a_test("b::x", 2, 1)
    assert mutant_tests.nearest([broad, narrow], 60) == [narrow, broad]
    assert mutant_tests.nearest([broad, narrow], 2) == [narrow]


def test_a_file_that_ends_the_run_without_a_mutant_costs_no_other_file(tmp_path):
    class Python:
        items = ("a.py::x", "b.py::x", "b.py::y", "c.py::x")

        @staticmethod
        def state(name: str) -> str:
            return f"{name} now"

        @staticmethod
        def record(names: list[str], note: Callable[[Any], None]) -> None:
            for name in names:
                if name.startswith("b"):
                    return  # as if the process had been aborted
                note(mutant_tests.Test(name, f"{name} now", True, 0.1, (1,)))

    run = object.__new__(mutant_tests.Run)
    run.folder, run.plan, run.recorded, run.output = tmp_path, {"state": "s"}, {}, io.StringIO()
    run._read_recorded()
    run._record(Python())
    assert list(run.recorded) == ["a.py::x", "c.py::x"]
    assert run.output.getvalue().count("left out, ended the run without a mutant: b.py") == 2


def test_a_child_tells_its_status_or_hangs():
    assert mutant_tests.in_child(lambda: 0, 60) == 0
    assert mutant_tests.in_child(lambda: 1, 60) != 0
    assert mutant_tests.in_child(lambda: signal.pause() or 0, 0.1) is None


def test_the_summary_names_what_nobody_noticed(tmp_path):
    plan = {
        "mutants": [
            {"file": "a.py", "key": "1", "name": "a.py:1: x -> y"},
            {"file": "a.py", "key": "2", "name": "a.py:2: x -> y"},
            {"file": "a.cpp", "key": "3", "name": "a.cpp:3: x -> y"},
        ]
    }
    file = tmp_path / "results.jsonl"
    for key, verdict in (("1", "killed"), ("2", "killed"), ("1", "survives"), ("3", "open")):
        mutant_results.note(key, {"is": verdict}, file)
    mutant_results.note("gone", {"is": "killed"}, file)
    mutant_results.drop_others({"1", "2", "3"}, file)
    results = mutant_results.read(file)
    assert len(file.read_text().splitlines()) == 3
    assert mutate_at_random.summary(plan, results).splitlines() == [
        "C++: 0 of 1 run: 0 killed, 0 hangs, 0 survives, 0 not reached",
        "- survives: a.py:1: x -> y",
        "Python: 2 of 2 run: 1 killed, 0 hangs, 1 survives, 0 not reached",
    ]
