# SPDX-License-Identifier: Apache-2.0
"""What the demo prints after both programs: parts that short runs do not reach."""

import argparse

import pytest

import demo
import demo_pace


def results(mark, loss, mode="fp32"):
    row = {"mode": mode, "losses": {str(mark): loss}, "final_loss": loss}
    return {"Python": {"rows": [row]}, "C++": {"rows": [{**row, "final_loss": loss + 1}]}}


def test_published_losses_stand_beside_fastamps_where_reached(capsys):
    demo.compare_published(results(200_000, 0.00319))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["C++", "fp32", "200k", "0.003190", "0.003190", "1.000"]
    assert len(lines) == 5


def test_published_losses_are_left_out_of_short_runs(capsys):
    demo.compare_published(results(2000, 0.5))
    demo.compare_published(results(200_000, 0.5, mode="bf16"))
    assert capsys.readouterr().out == ""


def test_difference_of_the_languages_is_the_largest(capsys):
    demo.compare_languages(results(10, 0.5))
    assert capsys.readouterr().out.splitlines()[-1].split() == ["fp32", "1"]


@pytest.mark.parametrize(
    ("iterations", "until_loss", "marks"),
    [
        (1, None, [1]),
        (20, None, [1, 2, 10, 20]),
        (200_000, None, [1, 20_000, 100_000, 200_000]),
        (450_000, 1e-3, [1, 100_000, 200_000, 300_000, 400_000]),
    ],
)
def test_marks(iterations, until_loss, marks):
    assert demo.marks_of(iterations, until_loss) == marks


@pytest.mark.parametrize(
    "words", [["--iters", "0"], ["--until-loss", "0"], ["--until-loss", "nan"]]
)
def test_senseless_lengths_are_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        demo.parse(words)
    assert stop.value.code == 2
    assert f"argument {words[0]}: expected" in capsys.readouterr().err


@pytest.fixture
def machine(monkeypatch):
    """A machine of which tests say how long an iteration takes in each mode."""
    pace = {}
    monkeypatch.setattr(demo, "measure_pace", lambda _: pace)
    return lambda *times: pace.update(zip(("fp32", "bf16", "fp16", "fp8"), times, strict=True))


def plan(iters=None, until_loss=None):
    return demo.plan(argparse.Namespace(iters=iters, until_loss=until_loss), "digits.pt")


def test_fast_machines_run_all_iterations(machine, capsys):
    machine(1.0, 2.0, 2.0, 3.0)
    assert plan() == ["--iters", "2000", "--marks", "1,200,1000,2000"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("16000 iterations in all, about 32 s: ")


def test_slow_modes_are_shortened_and_their_ends_are_compared(machine, capsys):
    machine(1.0, 2.0, 30.0, 60.0)
    words = plan()
    assert words[:4] == ["--iters", "2000", "--shorter", "fp16=480,fp8=240"]
    assert words[4:] == ["--marks", "1,200,240,480,1000,2000"]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("slow here, so shorter than 2000 iterations: fp16 480, fp8 240; ")
    assert first.endswith("ITERS=2000 runs all")
    assert second == (
        "9440 iterations in all, about 70 s: "
        "from Python and from C++ fp32 2000, bf16 2000, fp16 480, fp8 240"
    )


@pytest.mark.parametrize(
    "times",
    [
        (1.0, 2.0, 30.0, 60.0),
        (1.5, 60.0, 60.0, 90.0),  # no bf16 arithmetic either
        (400.0, 500.0, 600.0, 700.0),
        (900.0, 1000.0, 3000.0, 5000.0),
        (0.1, 0.1, 0.1, 9000.0),
        (50.0, 1.0, 1.0, 1.0),  # whichever is the slow one
    ],
)
def test_training_ends_in_time_on_any_machine(times):
    modes = ("fp32", "bf16", "fp16", "fp8")
    pace = dict(zip(modes, times, strict=True))
    found = demo.lengths(pace, 2000)
    assert tuple(found) == modes
    assert all(1 <= count <= 2000 for count in found.values())
    seconds = 2e-3 * sum(pace[mode] * count for mode, count in found.items())
    assert seconds <= demo.SECONDS < 90
    if any(count < 2000 for count in found.values()):
        assert seconds > demo.SECONDS / 2  # and uses its time


def test_iterations_that_were_asked_for_are_run(machine, capsys):
    machine(1.0, 2.0, 30.0, 5e5)
    assert plan(iters=10) == ["--iters", "10", "--marks", "1,5,10"]
    assert "80 iterations in all, about 10001 s" in capsys.readouterr().out


def test_a_target_loss_has_no_length(capsys):
    words = [
        "--iters",
        "2000000",
        "--until-loss",
        "0.5",
        "--marks",
        "1,100000,200000,300000,400000",
    ]
    assert plan(until_loss=0.5) == words
    assert "at most 2000000 iterations" in capsys.readouterr().out


def test_the_pace_is_that_of_a_typical_iteration():
    warm_up = [9.0] * demo_pace.WARM_UP
    assert demo_pace.typical([*warm_up, 1.0, 1.1, 7.0]) == 1.1
    assert demo_pace.typical(warm_up[:2]) == 9.0  # one that took all the time there was
