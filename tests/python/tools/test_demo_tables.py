# SPDX-License-Identifier: Apache-2.0
"""What the demo prints after both programs: parts that short runs do not reach."""

import argparse

import pytest

import demo


def results(mark, loss, mode="fp32"):
    row = {"mode": mode, "losses": {str(mark): loss}, "final_loss": loss}
    return {"Python": {"rows": [row]}, "C++": {"rows": [{**row, "final_loss": loss + 1}]}}


def test_published_losses_stand_beside_ours_where_reached(capsys):
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
def cpu(monkeypatch, tmp_path):
    """A CPU of which tests say what it can; fp16 is slow there."""
    pace = {"device": "cpu", "ms": {"fp32": 1.0, "bf16": 2.0, "fp16": 30.0}}
    monkeypatch.setattr(demo, "measure_pace", lambda _: pace)
    cpuinfo = tmp_path / "cpuinfo"
    known = demo.has_fp16_arithmetic
    monkeypatch.setattr(demo, "has_fp16_arithmetic", lambda: known(cpuinfo))
    return cpuinfo


def plan(iters=None, until_loss=None):
    return demo.plan(argparse.Namespace(iters=iters, until_loss=until_loss), "digits.pt")


def test_cpus_without_fp16_arithmetic_run_few_iterations_of_it_and_say_so(cpu, capsys):
    cpu.write_text("processor: 0\nflags\t: avx2 avx512_bf16\n")
    assert plan() == ["--iters", "2000", "--fp16-iters", "200"]
    first, second = capsys.readouterr().out.splitlines()
    assert "no fp16 arithmetic: 200 iterations" in first
    assert second.startswith("8400 iterations in all, about 24 s: ")
    assert second.endswith("from Python and from C++ fp32 2000, bf16 2000, fp16 200")


@pytest.mark.parametrize("text", ["flags\t: avx512_fp16\n", "Features : fphp asimdhp\n", None])
def test_other_cpus_run_all_iterations(cpu, capsys, text):
    if text is not None:
        cpu.write_text(text)
    assert plan() == ["--iters", "2000"]
    assert "12000 iterations in all, about 132 s" in capsys.readouterr().out


def test_iterations_that_were_asked_for_are_run(cpu, capsys):
    cpu.write_text("flags : avx2\n")
    assert plan(iters=10) == ["--iters", "10"]
    assert "60 iterations in all, about 1 s" in capsys.readouterr().out


def test_a_target_loss_has_no_length(capsys):
    assert plan(until_loss=0.5) == ["--iters", "2000000", "--until-loss", "0.5"]
    assert "at most 2000000 iterations" in capsys.readouterr().out
