# SPDX-License-Identifier: Apache-2.0
"""Tables hide nothing, files keep everything, and comparisons distinguish change from noise."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import compare, pages, report, results_file, table
from benchmarks.harness import BASELINE, FASTAMP, Result
from benchmarks.noise import change
from benchmarks.rows import weight_copies

ROOT = Path(__file__).resolve().parents[3]


def result(name, baseline, own):
    return Result(name, 1, {BASELINE: baseline, FASTAMP: own})


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_slower_rows_are_named_and_noise_is_called_noise():
    results = [
        result("fast", [2.0, 2.1, 2.2], [1.0, 1.0, 1.0]),
        result("slow", [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]),
        result("even", [1.0, 0.9, 1.1], [1.01, 1.0, 1.0]),
    ]
    text = table.summary(results)
    assert "slower than torch.amp in 2 of 3 rows" in text
    assert "slow: 0.50x (quartiles 0.50-0.50)" in text
    assert "even: 0.99x" in text
    assert text.count("within noise") == 1
    assert text.index("slow: ") < text.index("even: ")


def test_a_row_without_torchs_side_is_shown_and_is_never_slower(tmp_path):
    alone = Result("alone", 1, {FASTAMP: [2e3] * 3}, group="C++")
    alone.goal, alone.goal_reached = "at most 1 us", False
    results = [alone, result("both", [2.0] * 3, [1.0] * 3)]
    assert "2 us" in table.text_table(results)
    summary = table.summary(results)
    assert "slower than torch.amp in 0 of 2 rows" in summary
    assert "alone: at most 1 us (found: 2 us)" in summary
    results[1].group = "C++"
    path = tmp_path / "r.json"
    results_file.save(path, {"date": "2026-01-01", "cpu": "c", "gpu": "none"}, results, [])
    pages.figures(path, results_file.load(path)[1], tmp_path)
    (verdict, _) = compare.compare(results, results)
    assert verdict.word == ""


def test_goals_that_are_missed_say_what_was_found():
    found = result("r", [2e3] * 3, [1e3] * 3)
    found.goal, found.goal_reached = "at least 3x and casts: not more than torch.amp's", False
    found.facts = {BASELINE: {"casts": 4.0, "ops": 9.0}, FASTAMP: {"casts": 5.0, "ops": 9.0}}
    (line,) = table.missed([found])
    assert line == f"r: {found.goal} (found: 1 us, 2.00x, casts 5, torch.amp 4)"


def test_narrow_tables_fit(monkeypatch):
    results = [result("x" * 40, [2e3, 2e3], [1e3, 1e3])]
    monkeypatch.setenv("COLUMNS", "60")
    lines = table.text_table(results).splitlines()
    assert max(map(len, lines)) <= 60
    assert "2.00x" in lines[-1]


def test_other_candidates_and_facts_are_shown():
    found = result("r", [2e3, 2e3], [1e3, 1e3])
    found.samples["torch fused"] = [3e3, 3e3]
    found.facts = {FASTAMP: {"casts": 7.0}}
    text = table.text_table([found])
    assert "torch fused 3 us (3.00x, 3.00-3.00)" in text
    assert "fastamp: casts 7" in text


def test_saved_results_come_back(tmp_path):
    path = tmp_path / "r.json"
    found = result("a", [1.0, 2.0], [3.0, 4.5])
    found.curve, found.work = ("c", 10.0), (32.0, "images")
    found.facts = {FASTAMP: {"casts": 7.0}}
    results_file.save(path, {"gpu": "none"}, [found], ["a note"])
    assert results_file.load(path) == ({"gpu": "none"}, [found], ["a note"])
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def noisy(median, seed, spread=0.05, count=101):
    """Samples with drift, as neighbours on a shared machine have it."""
    rng, level, values = random.Random(seed), 0.0, []
    for _ in range(count):
        level = 0.8 * level + rng.gauss(0, spread)
        values.append(median * (1 + level) + abs(rng.gauss(0, spread * median)))
    return values


def test_intervals_of_equal_runs_nearly_always_hold_one():
    outside = 0
    for seed in range(60):
        found = change(noisy(1.0, 2 * seed), noisy(1.0, 2 * seed + 1), 0.99)
        assert found.low <= found.middle <= found.high
        outside += not found.low <= 1 <= found.high
    assert outside <= 4


def test_intervals_narrow_with_more_repeats():
    few = change(noisy(1, 0, count=31), noisy(1, 1, count=31), 0.99)
    many = change(noisy(1, 0, count=3001), noisy(1, 1, count=3001), 0.99)
    assert many.high - many.low < (few.high - few.low) / 3


@pytest.mark.parametrize(
    ("factor", "word"), [(1.0, ""), (1.03, ""), (1.5, "SLOWER"), (0.6, "faster")]
)
def test_changes_beyond_noise_and_threshold_are_named(factor, word):
    old = result("r", noisy(100, 0), noisy(50, 1))
    new = result("r", noisy(300, 2), noisy(150 * factor, 3))  # a machine a third as fast
    (verdict,) = compare.compare([old], [new])
    assert verdict.word == word


def test_absolute_comparison_is_of_times():
    old, new = (result("r", noisy(t, 0), noisy(t, 1)) for t in (100, 200))
    assert compare.compare([old], [new])[0].word == ""
    assert compare.compare([old], [new], absolute=True)[0].word == "SLOWER"


def test_more_casts_are_worse_however_fast():
    old, new = result("r", [2.0] * 9, [1.0] * 9), result("r", [2.0] * 9, [1.0] * 9)
    old.facts, new.facts = (
        {FASTAMP: {"casts": 4.0, "loss": 1}},
        {FASTAMP: {"casts": 5.0, "loss": 9}},
    )
    (verdict,) = compare.compare([old], [new])
    assert verdict.more == ["casts 4 -> 5"]


def save(path, own, name="r"):
    rows = [result(name, noisy(100, 0), noisy(own, 1))]
    results_file.save(path, {"gpu": "none", "cpu": path.stem}, rows, [])


def test_compare_from_the_command_line(tmp_path):
    old, new, other = (tmp_path / name for name in ("old.json", "new.json", "other.json"))
    save(old, 50)
    save(new, 90)
    save(other, 50, "another row")
    same = run("compare", old, old)
    assert same.returncode == 0, same.stderr
    assert "1 rows compared: 0 worse" in same.stdout
    slower = run("compare", old, new)
    assert slower.returncode == 1
    assert "SLOWER" in slower.stdout
    assert "not the same cpu: old and new" in slower.stdout
    assert run("compare", new, old).returncode == 0
    assert run("compare", old, other).returncode == 2
    missing = run("compare", old, tmp_path / "none.json")
    assert missing.returncode == 2
    assert "no such file" in missing.stderr


def test_command_line_filters_and_keeps_raw_samples(tmp_path):
    out = tmp_path / "raw.json"
    found = run("--quick", "--minutes", "0.05", "--filter", "^region: reused", "--out", out)
    assert found.returncode == 0, found.stderr
    document = json.loads(out.read_text())
    assert [row["name"] for row in document["rows"]] == ["region: reused"]
    assert len(document["rows"][0]["samples"][FASTAMP]) >= 30
    assert document["environment"]["torch"] == torch.__version__
    assert "load_at_end" in document["environment"]
    assert "speed-up" in found.stdout
    assert "fastamp is slower than torch.amp in" in found.stdout


def test_command_line_refuses_what_it_cannot_do():
    assert run("--filter", "(").returncode == 2
    assert run("--minutes", "0").returncode == 2
    nothing = run("--filter", "no such row")
    assert nothing.returncode == 2
    assert "no row matches" in nothing.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_rows_are_refused_without_a_gpu_but_can_be_listed():
    assert run("--device", "cuda", "--filter", "cuda: scale").returncode == 2
    listed = run("--device", "cuda", "--list", "--filter", "claim")
    assert listed.returncode == 0
    assert "ViT-B" in listed.stdout


def test_readme_table_is_generated_and_plots_are_there():
    assert report.stale() == []


def test_page_hides_no_row_and_names_those_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    rows = [result("cpu: slow one", [1.0] * 9, [2.0] * 9), result("fast", [2.0] * 9, [1.0] * 9)]
    rows[0].goal, rows[0].goal_reached = "at least 9x", False
    rows[1].facts = {FASTAMP: {"casts": 3.0, "MiB peak": 1.5, "loss": 0.25}}
    path = tmp_path / "2026-01-01-abc-cpu.json"
    environment = {"gpu": "none", "cpu": "C", "cpus": "2", "torch": "2", "date": "2026-01-01"}
    results_file.save(path, {**environment, "revision": "abc"}, rows, ["a note"])
    text = pages.page({"none": path})
    assert "Rows slower than torch.amp: 1 of 2" in text
    assert "- cpu: slow one: 0.50x" in text
    assert "- cpu: slow one: at least 9x (found: 2 ns, 0.50x)" in text
    assert text.index("Where fastamp is behind") < text.index("| fast |")
    assert "| fast | fastamp | 3 |" in text
    assert "GPU rows are **not measured yet**" in text
    assert "cuda: claim: ViT-B" in text
    readme = pages.readme_table({"none": path})
    assert "fastamp is slower than torch.amp in 1 of 2 rows, in 1 of them" in readme
    assert "misses 1 of 1 goals" in readme
    assert "\n- cpu: slow one\n" in readme


def test_rows_with_weight_copies_have_a_plot_over_none(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    row = result("cpu: weight copies: m", noisy(100, 1), noisy(50, 2))
    row.samples[weight_copies.NO_COPIES], row.group = noisy(75, 3), weight_copies.GROUP
    row.facts = {FASTAMP: {"weight casts": 0.0, "MiB kept between steps": 1.5}}
    path = tmp_path / "2026-01-01-abc-cpu.json"
    environment = {"gpu": "none", "date": "2026-01-01", "revision": "abc"}
    results_file.save(path, environment, [row], [])
    text = pages.section(path)
    assert "no weight copies 7" in text
    assert "| cpu: weight copies: m | fastamp | 0 |" in text
    assert "| cpu: weight copies: m | fastamp | 1.5 |" in text
    pages.figures(path, [row], tmp_path / "plots")
    drawn = {f"plots/{p.name}" for p in (tmp_path / "plots").iterdir()}
    assert drawn == {link.partition(")")[0] for link in text.split("](")[2:]}
    assert len(drawn) == 2


def test_page_of_a_gpu_does_not_say_that_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    path = tmp_path / "2026-01-01-abc-NVIDIA-H200.json"
    environment = {"gpu": "NVIDIA H200", "torch": "2", "date": "2026-01-01", "revision": "abc"}
    results_file.save(path, environment, [result("cuda: r", [2.0] * 9, [1.0] * 9)], [])
    assert "not measured yet" not in pages.page({"NVIDIA H200": path})
    assert "nvidia-h200" in pages.plot_name(path, "Scaler")


def test_newest_result_of_each_machine_is_shown(tmp_path):
    for name, gpu, date in (
        ("a", "none", "1"),
        ("b", "none", "3"),
        ("c", "none", "2"),
        ("d", "G", "1"),
    ):
        results_file.save(tmp_path / f"{name}.json", {"gpu": gpu, "date": date}, [], [])
    newest = report.newest_results(tmp_path)
    assert {gpu: path.stem for gpu, path in newest.items()} == {"none": "b", "G": "d"}


def test_without_matplotlib_pages_are_written_and_plots_stay(tmp_path, monkeypatch, capsys):
    for name, value in (("PAGE", "p.md"), ("README", "r.md"), ("PLOTS", "plots")):
        monkeypatch.setattr(report, name, tmp_path / value)
    (tmp_path / "r.md").write_text(f"{report.BEGIN}\n{report.END}\n")
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "old.svg").write_text("old")
    monkeypatch.setattr(sys, "argv", ["report"])
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda _: None)
    assert report.main() == 0
    assert capsys.readouterr().out == "left out: plots: matplotlib is not installed\n"
    assert (tmp_path / "p.md").read_text().startswith("# Performance")
    assert (tmp_path / "plots" / "old.svg").exists()


def test_table_goes_between_the_markers_only():
    readme = f"before\n{report.BEGIN}\nold\n{report.END}\nafter"
    assert report.with_table(readme, "new\n") == readme.replace("old", "new")
    with pytest.raises(SystemExit, match="no markers"):
        report.with_table("no markers here", "new")


def test_plots_are_drawn_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    rows = []
    for count in (1, 10, 100):
        rows.append(result(f"cpu: u, {count}", noisy(100 * count, 1), noisy(50 * count, 2)))
        rows[-1].curve, rows[-1].bytes_moved = ("cpu: u, bytes", count), 64 * count
        rows[-1].samples["foreach mul"] = noisy(40 * count, 3)
    for folder in ("one", "two"):
        pages.figures(tmp_path / "x-cpu.json", rows, tmp_path / folder)
    first, second = (sorted((tmp_path / folder).iterdir()) for folder in ("one", "two"))
    assert [p.name for p in first] == ["cpu-curve-cpu-u-bytes.svg", "cpu-rows.svg"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_results_of_one_machine_can_be_merged(tmp_path):
    one, two, other, out = (tmp_path / f"{name}.json" for name in ("one", "two", "other", "out"))
    machine = {"gpu": "G", "cpu": "C", "revision": "r", "torch": "2", "load_at_end": "1"}
    results_file.save(one, machine, [result("a", [1.0], [1.0]), result("b", [1.0], [1.0])], ["n"])
    results_file.save(two, {**machine, "load_at_end": "2"}, [result("b", [5.0], [1.0])], ["n"])
    results_file.save(other, {**machine, "gpu": "H"}, [result("c", [1.0], [1.0])], [])
    assert run("merge", one, two, tmp_path / "gone.json", "--out", out).returncode == 0
    environment, rows, notes = results_file.load(out)
    assert [(row.name, row.samples[BASELINE]) for row in rows] == [("a", [1.0]), ("b", [5.0])]
    assert environment["load_at_end"] == "2"
    assert notes == ["gone: not measured", "n"]
    refused = run("merge", one, other, "--out", out)
    assert refused.returncode == 2
    assert "gpu is H, not G" in refused.stderr
