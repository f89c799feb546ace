"""What the demo prints after both programs: parts that short runs do not reach."""

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
