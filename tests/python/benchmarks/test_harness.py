# SPDX-License-Identifier: Apache-2.0
"""The harness measures what it says."""

import re
import time

import pytest
import torch

import fastamp
from benchmarks import goals, harness, results_file, run, table
from benchmarks.budget import QUICK, Budget, Effort
from benchmarks.clocks import event_loop, host_loop
from benchmarks.harness import BASELINE, FASTAMP, Candidate, Result, Row, measure, nothing
from benchmarks.rows import all_rows

ONCE = Effort(2, 1e-6, row_seconds=0, promised_repeats=2, least_repeats=2)


def pauses(baseline, own, log=None):
    def candidates():
        return {
            name: Candidate(
                "sleep(pause)",
                {"sleep": time.sleep, "pause": pause},
                before=lambda name=name: log is not None and log.append(name),
            )
            for name, pause in ((BASELINE, baseline), (FASTAMP, own))
        }

    return candidates


def test_blocks_take_turns():
    calls = []
    found = measure(Row("r", pauses(0.01, 0.001, calls)), Effort(4, 1e-6, promised_repeats=4))
    assert calls[-8:] == [BASELINE, FASTAMP, FASTAMP, BASELINE] * 2
    assert found.calls_per_block == 1
    assert min(found.samples[BASELINE]) > min(found.samples[FASTAMP]) > 1e6


@pytest.mark.parametrize(("pause", "calls"), [(0.0, 2), (0.006, 1)])
def test_only_short_calls_are_made_once_before_the_clock_starts(pause, calls):
    made = []

    def candidates():
        names = {"made": made, "pause": (lambda: time.sleep(pause)) if pause else nothing}
        candidate = Candidate("made.append(0); pause()", names, before=made.clear)
        return {BASELINE: candidate, FASTAMP: candidate}

    measure(Row("r", candidates), Effort(2, 1e-9, 0, 2, 0, 2))
    assert len(made) == calls


def clocked(monkeypatch, call, hiccups):
    """Blocks by a clock of the test: calls of so many ns, and what the n-th loop takes longer."""
    loops = iter(range(10**6))
    made = []

    def compile_loop(*_):
        def loop(count):
            made.append(count)
            return count * call + hiccups.get(next(loops), 0.0)

        return loop

    monkeypatch.setattr(harness, "compile_loop", compile_loop)
    row = Row("r", lambda: {name: Candidate("", {}) for name in (BASELINE, FASTAMP)})
    return harness._Blocks(row), made


@pytest.mark.parametrize("at", range(24))
@pytest.mark.parametrize("hiccup", [3.7e6, 6e6, 4e7])
def test_a_hiccup_while_the_number_of_calls_is_sought_changes_nothing(monkeypatch, at, hiccup):
    blocks, _ = clocked(monkeypatch, 1000.0, {})
    expected = blocks.calls_for(1e-3)
    assert expected == 1024
    blocks, made = clocked(monkeypatch, 1000.0, {at: hiccup})
    assert blocks.calls_for(1e-3) == expected
    made.clear()
    blocks.run(BASELINE, 7)
    assert made == [1, 7]  # still warmed up: its calls are short


def test_a_long_call_is_made_once(monkeypatch):
    blocks, made = clocked(monkeypatch, 3e8, {})
    assert blocks.calls_for(1e-3) == 1
    assert len(made) == 2


@pytest.mark.parametrize(
    ("samples", "notes"),
    [
        ([40.0, 10.0, 11.0, 10.0], ["fastamp: the first sample is 4 times the median"]),
        ([2.0, 10.0, 11.0, 10.0], ["fastamp: the first sample is 0.2 times the median"]),
        ([19.0, 10.0, 11.0, 10.0], []),
        ([40.0, 10.0, 11.0, 50.0], []),  # as spread as the others
        ([40.0, 10.0], []),
    ],
)
def test_a_first_sample_far_from_the_others_is_told(samples, notes):
    found = Result("r", 1, {BASELINE: [5.0] * len(samples), FASTAMP: samples})
    harness.note_first_samples(found)
    assert found.notes == notes


def test_hooks_run_around_every_block_outside_the_clock(monkeypatch):
    open_now = []
    clock = [0.0]

    def compile_loop(candidate, _):
        def loop(count):
            start = clock[0]
            for _ in range(count):
                candidate.names["work"]()
            return clock[0] - start

        return loop

    monkeypatch.setattr(harness, "compile_loop", compile_loop)

    def candidates():
        def work():
            assert open_now == [True]
            clock[0] += 1e3

        def before():
            clock[0] += 1e7
            open_now.append(True)

        return {
            name: Candidate("work()", {"work": work}, before, open_now.clear)
            for name in (BASELINE, FASTAMP)
        }

    found = measure(Row("r", candidates), ONCE)
    assert open_now == []
    assert set(found.samples[FASTAMP]) == {1e3}


@pytest.mark.parametrize(
    ("repeats", "seconds", "done"),
    [
        (2, 1e9, False),  # the least, whatever it takes
        (3, 19.9, False),  # what was promised, while the limit allows
        (3, 20, True),
        (10, 15, False),
        (11, 10, True),  # more, while there is time
        (11, 9.9, False),
        (30, 0, True),
    ],
)
def test_repeats_are_promised_and_limited(repeats, seconds, done):
    effort = Effort(30, row_seconds=10, promised_repeats=11, limit_seconds=20, least_repeats=3)
    assert effort.enough(repeats, seconds) == done


@pytest.mark.parametrize(
    ("each", "spent", "repeats"), [(0.1, 0, 30), (0.5, 0, 20), (1, 0, 11), (2, 4, 8), (9, 5, 3)]
)
def test_repeats_that_are_planned_are_those_that_are_enough(each, spent, repeats):
    effort = Effort(30, row_seconds=10, promised_repeats=11, limit_seconds=20, least_repeats=3)
    assert effort.repeats_for(each, spent) == repeats
    if repeats < 30:
        assert effort.enough(repeats, spent + (repeats + 1) * each)


@pytest.mark.parametrize(
    ("limit", "repeats", "notes"), [(0, 3, ["only 3 repeats, for want of time"]), (600, 9, [])]
)
def test_slow_rows_get_fewer_repeats_and_say_so(limit, repeats, notes):
    effort = Effort(100, 1e-6, 0, promised_repeats=9, limit_seconds=limit, least_repeats=3)
    found = measure(Row("r", pauses(0.001, 0.001)), effort)
    assert found.repeats == len(found.samples[FASTAMP]) == repeats
    assert [note for note in found.notes if "repeats" in note] == notes
    assert all(note in table.remarks(found) for note in notes)


def test_the_time_of_counting_is_the_rows_too():
    def facts(quick):
        time.sleep(0.2)
        return {FASTAMP: {"quick": quick}}

    effort = Effort(100, 1e-6, 0, promised_repeats=9, limit_seconds=0.2, least_repeats=3)
    found = measure(Row("r", pauses(0.001, 0.001), facts=facts), effort)
    assert found.repeats == 3
    assert found.facts == {FASTAMP: {"quick": False}}


def test_light_rows_leave_their_time_to_heavy_ones():
    now = [0.0]
    budget = Budget(100, 125, weight=10, clock=lambda: now[0])
    assert budget.effort(Effort(), 2).row_seconds == 20
    now[0] = 4.0  # it needed less
    effort = budget.effort(QUICK, 6)
    assert effort.quick
    assert effort.row_seconds == 30  # of 72: more is never worth it
    assert effort.limit_seconds == 60
    now[0] = 90.0
    effort = budget.effort(Effort(), 2)
    assert (effort.row_seconds, effort.limit_seconds) == (10, 35)
    assert not budget.is_over()
    now[0] = 125.0
    assert budget.is_over()
    assert budget.effort(Effort(), 1).limit_seconds == 0


def test_no_row_is_dropped_without_a_word(tmp_path, monkeypatch, capsys):
    rows = [Row(name, pauses(1e-3, 1e-3), weight=weight) for name, weight in (("b", 2), ("a", 1))]
    monkeypatch.setattr(run, "all_rows", lambda _: rows)
    monkeypatch.setattr(run.cpp_programs, "row_names", list)
    monkeypatch.setattr(run.Budget, "is_over", lambda self: self._weight < 3)
    plan = run.Plan(re.compile(""), "cpu", quick=True, seconds=1, out=tmp_path / "r.json")
    assert run.run(plan) == 1
    output = capsys.readouterr().out
    assert "b: NOT MEASURED: the time was over" in output
    _, results, notes = results_file.load(plan.out)
    assert [result.name for result in results] == ["a"]
    assert notes == ["b: NOT MEASURED: the time was over"]


def test_rows_are_saved_one_by_one_and_only_missing_ones_are_measured(
    tmp_path, monkeypatch, capsys
):
    made = []

    def candidates(name):
        def make():
            made.append(name)
            if made == ["a", "b"]:
                raise KeyboardInterrupt
            return pauses(1e-4, 1e-4)()

        return make

    rows = [Row(name, candidates(name)) for name in "abc"]
    monkeypatch.setattr(run, "all_rows", lambda _: rows)
    monkeypatch.setattr(run.cpp_programs, "row_names", list)
    out = tmp_path / "r.json"
    plan = run.Plan(re.compile(""), "cpu", quick=True, seconds=1, out=out, resume=True)
    with pytest.raises(KeyboardInterrupt):
        run.run(plan)
    first = results_file.load(out)[1]
    assert [result.name for result in first] == ["a"]
    assert run.run(plan) == 0
    assert made == ["a", "b", "b", "c"]
    environment, results, _ = results_file.load(out)
    assert [result.name for result in results] == ["a", "b", "c"]
    assert results[0] == first[0]
    assert environment["resumed"].startswith("1 rows of ")
    monkeypatch.setattr(run, "describe", lambda: {**environment, "gpu": "none", "torch": "0"})
    assert run.run(plan) == 0
    assert made[4:] == ["a", "b", "c"]
    assert "torch was" in capsys.readouterr().out


def test_calls_are_counted_until_a_block_is_long_enough():
    count = [0]

    def candidates():
        def work():
            count[0] += 1

        return {name: Candidate("work()", {"work": work}) for name in (BASELINE, FASTAMP)}

    found = measure(Row("r", candidates), Effort(2, 1e-3, 0, 2, 0, 2))
    assert found.calls_per_block > 100
    assert count[0] > 4 * found.calls_per_block


def test_names_of_a_statement_may_hide_nothing_of_the_loop():
    loop = host_loop("total.append(count * range)", {"total": [], "count": 2, "range": 3}, "cpu")
    assert loop(5) > 0
    assert loop.__kwdefaults__["total"] == [6] * 5


@pytest.mark.cuda
def test_names_of_a_statement_may_hide_nothing_of_the_loop_of_events():
    loop = event_loop("total.append(sum * zip)", {"total": [], "sum": 2, "zip": 3})
    assert loop(5) >= 0
    assert loop.__kwdefaults__["total"] == [6] * 5


def test_facts_are_taken_while_no_candidate_is_alive():
    import weakref

    alive = []

    class Thing:
        def __call__(self):
            pass

    def candidates():
        thing = Thing()
        alive.append(weakref.ref(thing))
        return {name: Candidate("thing()", {"thing": thing}) for name in (BASELINE, FASTAMP)}

    def facts(_):
        assert all(thing() is None for thing in alive)
        return {FASTAMP: {"casts": 1.0}}

    row = Row("r", candidates, goal=goals.at_most(1e12), facts=facts)
    for _ in range(2):
        assert measure(row, ONCE).facts == {FASTAMP: {"casts": 1.0}}
        assert alive


def test_speedup_pairs_neighbours_so_that_drift_cancels():
    drift = [1.0, 10.0, 100.0, 1000.0]
    samples = {BASELINE: [2 * d for d in drift], FASTAMP: drift, "other": [3 * d for d in drift]}
    found = Result("r", 1, samples)
    assert found.speedup() == (2, 2, 2)
    assert found.speedup("other") == (3, 3, 3)


@pytest.mark.parametrize(
    ("goal", "reached"),
    [
        (goals.at_most(10), True),
        (goals.at_most(9), False),
        (goals.at_least_times(2), True),
        (goals.at_least_times(2.1), False),
        (goals.not_slower(), True),
        (goals.near_bandwidth_of("copy", 0.9, 100), True),  # fastamp's 20 B/ns, copy 20 B/ns
        (goals.near_bandwidth_of("copy", 0.9, 150), False),
        (goals.fewer("casts"), True),
        (goals.fewer("casts", 0.5), False),
        (goals.both(goals.at_most(10), goals.at_most(9)), False),
        (goals.both(goals.at_most(10), goals.at_least_times(2)), True),
    ],
    ids=lambda value: getattr(value, "text", str(value)),
)
def test_goals_say_what_was_measured(goal, reached):
    found = Result("r", 1, {BASELINE: [20.0] * 3, FASTAMP: [10.0] * 3, "copy": [5.0] * 3}, 200)
    found.facts = {BASELINE: {"casts": 4.0}, FASTAMP: {"casts": 3.0}}
    assert goal.reached(found) == reached


def test_row_names_are_unique_and_gpu_rows_need_no_gpu_to_be_listed():
    names = [row.name for row in all_rows(["cpu", "cuda"])]
    assert len(set(names)) == len(names)
    assert sum(name.startswith("cuda:") for name in names) > 40
    for row in all_rows(["cuda"]):
        assert row.device == "cuda"


BIG = ("0000", "1000 ", "600k", "256x256", "iB", "ResNet", "ViT", "BERT", "GPT", "blocks", "MLP")
BIG += ("tiny",)


@pytest.mark.parametrize(
    "row",
    [row for row in all_rows(["cpu"]) if not any(word in row.name for word in BIG)],
    ids=lambda row: row.name,
)
def test_rows_leave_autocast_as_it_was(row):
    if "clip" in row.name and not hasattr(fastamp.GradScaler, "clip_grad_norm_"):
        with pytest.raises(ImportError, match="clip_grad_norm_"):
            measure(row, ONCE)
        return
    state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    found = measure(row, ONCE)
    assert all(len(samples) == 2 and min(samples) > 0 for samples in found.samples.values())
    assert {BASELINE, FASTAMP} <= found.samples.keys()
    assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == state
    assert fastamp._C.kernels_registered()
