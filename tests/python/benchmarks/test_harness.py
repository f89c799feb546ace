"""The harness measures what it says."""

import time

import pytest
import torch

import fastamp
from benchmarks import goals
from benchmarks.clocks import host_loop
from benchmarks.harness import BASELINE, OURS, Candidate, Effort, Result, Row, measure, nothing
from benchmarks.rows import all_rows

ONCE = Effort(2, 1e-6, row_seconds=0, least_repeats=2)


def pauses(baseline, ours, log=None):
    def candidates():
        return {
            name: Candidate(
                "sleep(pause)",
                {"sleep": time.sleep, "pause": pause},
                before=lambda name=name: log is not None and log.append(name),
            )
            for name, pause in ((BASELINE, baseline), (OURS, ours))
        }

    return candidates


def test_blocks_take_turns():
    calls = []
    found = measure(Row("r", pauses(0.01, 0.001, calls)), Effort(4, block_seconds=1e-6))
    assert calls[-8:] == [BASELINE, OURS, OURS, BASELINE] * 2
    assert found.calls_per_block == 1
    assert min(found.samples[BASELINE]) > min(found.samples[OURS]) > 1e6


@pytest.mark.parametrize(("pause", "calls"), [(0.0, 2), (0.006, 1)])
def test_only_short_calls_are_made_once_before_the_clock_starts(pause, calls):
    made = []

    def candidates():
        names = {"made": made, "pause": (lambda: time.sleep(pause)) if pause else nothing}
        candidate = Candidate("made.append(0); pause()", names, before=made.clear)
        return {BASELINE: candidate, OURS: candidate}

    measure(Row("r", candidates), Effort(2, 1e-9, row_seconds=0, least_repeats=2))
    assert len(made) == calls


def test_hooks_run_around_every_block_outside_the_clock():
    open_now = []

    def candidates():
        def work():
            assert open_now == [True]

        def before():
            time.sleep(0.01)
            open_now.append(True)

        return {
            name: Candidate("work()", {"work": work}, before, open_now.clear)
            for name in (BASELINE, OURS)
        }

    found = measure(Row("r", candidates), ONCE)
    assert open_now == []
    assert max(found.samples[OURS]) < 1e7


def test_slow_rows_get_fewer_repeats_but_never_too_few():
    effort = Effort(repeats=100, block_seconds=1e-6, row_seconds=0.2, least_repeats=3)
    assert 3 <= len(measure(Row("r", pauses(0.01, 0.01)), effort).samples[OURS]) <= 6
    heavy = Row("r", pauses(0.01, 0.01), weight=1e4)
    assert len(measure(heavy, Effort(20, 1e-6, 0.01, 3)).samples[OURS]) == 20


def test_calls_are_counted_until_a_block_is_long_enough():
    count = [0]

    def candidates():
        def work():
            count[0] += 1

        return {name: Candidate("work()", {"work": work}) for name in (BASELINE, OURS)}

    found = measure(Row("r", candidates), Effort(2, 1e-3, row_seconds=0, least_repeats=2))
    assert found.calls_per_block > 100
    assert count[0] > 4 * found.calls_per_block


def test_names_of_a_statement_may_hide_nothing_of_the_loop():
    loop = host_loop("total.append(count * range)", {"total": [], "count": 2, "range": 3}, "cpu")
    assert loop(5) > 0
    assert loop.__kwdefaults__["total"] == [6] * 5


def test_facts_are_taken_after_the_candidates_are_gone():
    import weakref

    alive = []

    class Thing:
        def __call__(self):
            pass

    def candidates():
        thing = Thing()
        alive.append(weakref.ref(thing))
        return {name: Candidate("thing()", {"thing": thing}) for name in (BASELINE, OURS)}

    def facts():
        assert alive[0]() is None
        return {OURS: {"casts": 1.0}}

    row = Row("r", candidates, goal=goals.at_most(1e12), facts=facts)
    assert measure(row, ONCE).facts == {OURS: {"casts": 1.0}}


def test_speedup_pairs_neighbours_so_that_drift_cancels():
    drift = [1.0, 10.0, 100.0, 1000.0]
    samples = {BASELINE: [2 * d for d in drift], OURS: drift, "other": [3 * d for d in drift]}
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
        (goals.near_bandwidth_of("copy", 0.9, 100), True),  # ours 20 B/ns, copy 20 B/ns
        (goals.near_bandwidth_of("copy", 0.9, 150), False),
        (goals.fewer("casts"), True),
        (goals.fewer("casts", 0.5), False),
        (goals.both(goals.at_most(10), goals.at_most(9)), False),
        (goals.both(goals.at_most(10), goals.at_least_times(2)), True),
    ],
    ids=lambda value: getattr(value, "text", str(value)),
)
def test_goals_say_what_was_measured(goal, reached):
    found = Result("r", 1, {BASELINE: [20.0] * 3, OURS: [10.0] * 3, "copy": [5.0] * 3}, 200)
    found.facts = {BASELINE: {"casts": 4.0}, OURS: {"casts": 3.0}}
    assert goal.reached(found) == reached


def test_row_names_are_unique_and_gpu_rows_need_no_gpu_to_be_listed():
    names = [row.name for row in all_rows(["cpu", "cuda"])]
    assert len(set(names)) == len(names)
    assert sum(name.startswith("cuda:") for name in names) > 40
    for row in all_rows(["cuda"]):
        assert row.device == "cuda"


BIG = ("0000", "1000 ", "600k", "iB", "ResNet", "ViT", "BERT", "GPT", "blocks", "MLP", "tiny")


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
    assert {BASELINE, OURS} <= found.samples.keys()
    assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == state
    assert fastamp._C.is_installed()
