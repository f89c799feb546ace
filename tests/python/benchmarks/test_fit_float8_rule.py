# SPDX-License-Identifier: Apache-2.0
"""The fit of the fp8 rule's constants finds those that samples were made with, and writes them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fastamp._C as _C
from benchmarks import fit_float8_rule as fitting
from support import float8_model

ROOT = Path(__file__).resolve().parents[3]
CONSTANTS = ROOT / "src" / "autocast" / "policy" / "float8_constants.h"


def gpu(name: str = "H200 SXM") -> dict[str, Any]:
    return next(entry for entry in _C.float8_constants() if entry["name"] == name)


# Not the table's, so that a fit that returned those would be seen.
OTHER = {
    "carrier_rate": 700e12,
    "float8_rate": 1111e12,
    "bandwidth": 3.1e12,
    "launch_seconds": 3.3e-6,
    "min_work": 4e10,
}


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-6), (0.03, 0.02)])
@pytest.mark.parametrize("multiprocessors", [132, 78])
def test_the_constants_of_samples_are_found_again(
    noise: float, tolerance: float, multiprocessors: int
):
    truth = {**gpu(), **OTHER, "multiprocessors": multiprocessors}
    found = fitting.fit(fitting.synthetic(truth, noise), multiprocessors)
    assert found.keys() == OTHER.keys()
    for name, value in OTHER.items():
        # A launch is a small part of most samples, and the host one sample.
        slack = 3 if name in ("launch_seconds", "min_work") else 1
        assert found[name] == pytest.approx(value, rel=slack * tolerance), name


def test_samples_are_made_by_the_model_of_the_docs():
    of_docs = float8_model.GPUS["H200 SXM"]
    for kind, item in (("carrier", 2), ("float8", 1)):
        for rows, depth, columns in fitting.shapes():
            assert fitting.model_seconds(gpu(), kind, (rows, depth, columns)) == pytest.approx(
                float8_model.product_seconds(of_docs, rows, columns, depth, item)
            )


def test_casts_are_those_that_regions_make():
    """The bytes and launches of the samples, beside what the casts return."""
    for source, to in fitting.CASTS:
        matrix = torch.randn(64, 1024).to(source)
        made = _C.cast_matrix(matrix, to)
        assert made[0].dtype == to
        written = sum(cast.numel() * cast.element_size() for cast in made if cast.dtype == to)
        passes = 2 if to.itemsize == 1 else 1
        read = passes * matrix.numel() * matrix.element_size()
        assert fitting.cast_sizes(matrix.numel(), source, to) == (read + written, passes)
        if passes == 1:
            assert torch.equal(made[0], matrix.to(to))
        else:
            rows, columns, inverse_scale = made
            assert torch.equal(columns.view(torch.uint8), rows.view(torch.uint8).t())
            torch.testing.assert_close(
                rows.float() * inverse_scale, matrix.float(), rtol=2**-4, atol=1e-2
            )


def test_a_matrix_that_no_region_casts_is_refused():
    with pytest.raises(
        ValueError, match="expected a float32 matrix, or a 16-bit one to fp8, got Long"
    ):
        _C.cast_matrix(torch.zeros(2, 2, dtype=torch.int64), torch.bfloat16)


def test_a_table_that_is_not_there_yet_is_made_from_the_projects(tmp_path: Path):
    samples = tmp_path / "samples.json"
    raw = {
        "gpu": gpu(),
        "environment": {"date": "2026-01-01T00:00:00+00:00"},
        "samples": [dataclasses.asdict(s) for s in fitting.synthetic({**gpu(), **OTHER}, 0.0)],
    }
    samples.write_text(json.dumps(raw), encoding="utf-8")
    table = tmp_path / "new.h"
    before = CONSTANTS.read_text(encoding="utf-8")
    assert fitting.main(["--samples", str(samples), "--constants", str(table)]) == 0
    assert list(entries(table.read_text(encoding="utf-8"))) == list(entries(before))
    assert CONSTANTS.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("missing", ["cast", "carrier", "float8", "host"])
def test_a_fit_without_a_kind_of_samples_is_refused(missing: str):
    samples = [s for s in fitting.synthetic(gpu(), 0.0) if s.kind != missing]
    with pytest.raises(ValueError, match=f"of kind '{missing}', got fewer"):
        fitting.fit(samples, 132)


def test_samples_that_show_nothing_are_refused():
    samples = fitting.synthetic(gpu(), 0.0)
    flat = [
        dataclasses.replace(s, seconds=1e-3 / s.sizes[0]) if s.kind == "cast" else s
        for s in samples
    ]
    with pytest.raises(ValueError, match="expected larger casts to take longer"):
        fitting.fit(flat, 132)
    bound = [dataclasses.replace(s, seconds=2.6e-6) if s.kind == "carrier" else s for s in samples]
    with pytest.raises(ValueError, match="'carrier' product that computing bounds, got none"):
        fitting.fit(bound, 132)


def entries(text: str) -> dict[str, dict[str, float]]:
    return {
        name: {key: float(value) for key, value in re.findall(r"\.(\w+) = ([\d.e+-]+)", body)}
        for name, body in re.findall(r'\.name = "([^"]*)",(.*?)\},\n', text, re.DOTALL)
    }


def test_an_entry_is_replaced_and_nothing_else():
    before = CONSTANTS.read_text(encoding="utf-8")
    after = fitting.rewritten(before, {**gpu("H200 SXM"), **OTHER}, "Fitted " + "to samples " * 20)
    old, new = entries(before), entries(after)
    assert list(old) == list(new) == ["H100 SXM", "H200 SXM", "H200 NVL"]
    assert {name for name in old if old[name] != new[name]} == {"H200 SXM"}
    assert {key: new["H200 SXM"][key] for key in OTHER} == OTHER
    assert max(map(len, after.splitlines())) <= 100
    # Again the same, and back.
    assert fitting.rewritten(after, {**gpu(), **OTHER}, "Fitted " + "to samples " * 20) == after
    added = fitting.rewritten(before, {**gpu(), **OTHER, "name": "B200"}, "Fitted.")
    assert list(entries(added)) == [*old, "B200"]
    with pytest.raises(ValueError, match="expected entries of GPUs, got none"):
        fitting.rewritten("", gpu(), "")


def test_a_dry_run_fits_the_table_to_itself_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    table = tmp_path / "constants.h"
    assert fitting.main(["--dry-run", "--gpu", "H200 NVL", "--constants", str(table)]) == 0
    (found,) = entries(capsys.readouterr().out).values()
    assert found["carrier_rate"] == pytest.approx(635e12, rel=0.02)
    assert found["float8_rate"] == pytest.approx(1240e12, rel=0.02)
    assert not table.exists()


def test_samples_of_a_file_are_fitted_and_written(tmp_path: Path):
    table, file = tmp_path / "constants.h", tmp_path / "samples.json"
    table.write_text(CONSTANTS.read_text(encoding="utf-8"), encoding="utf-8")
    samples = fitting.synthetic({**gpu(), **OTHER}, 0.0)
    raw = {
        "gpu": gpu(),
        "environment": {"date": "2026-01-01T00:00:00+00:00"},
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }
    file.write_text(json.dumps(raw), encoding="utf-8")
    assert fitting.main(["--samples", str(file), "--constants", str(table)]) == 0
    text = table.read_text(encoding="utf-8")
    assert entries(text)["H200 SXM"]["float8_rate"] == pytest.approx(1111e12, rel=1e-3)
    assert "2026-01-01" in text


def test_bad_command_lines_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        fitting.main(["--dry-run", "--samples", "x.json"])
    assert "expected none with --dry-run, got one" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        fitting.main(["--dry-run", "--gpu", "A100"])
