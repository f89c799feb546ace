# SPDX-License-Identifier: Apache-2.0
"""The notebook: its cells run from top to bottom, and show what the committed outputs show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.children import run_program

NOTEBOOK = Path(__file__).resolve().parents[3] / "examples" / "notebooks" / "debugging.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def sources() -> list[str]:
    """The code cells, without lines for Jupyter itself."""
    cells = ("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code")
    return [re.sub(r"^%.*$", "", cell, flags=re.MULTILINE) for cell in cells]


def printed() -> str:
    """What the committed cells printed."""
    outputs = (output for cell in CELLS for output in cell.get("outputs", []))
    return "".join("".join(output.get("text", [])) for output in outputs)


def words(text: str) -> str:
    """Without numbers, which differ from machine to machine, and what is aligned by them."""
    return re.sub(r"[\d.e+%-]+|\s+", " ", text)


def test_the_committed_outputs_have_pictures_and_names_and_no_error():
    outputs = [output for cell in CELLS for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert "embed.weight  (256, 64)  inf 0  NaN 16384" in printed()
    assert "aten::mul.Tensor  norm" in printed()
    assert "/home/" not in NOTEBOOK.read_text(encoding="utf-8")


def test_cells_run_from_top_to_bottom(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    program = tmp_path / "notebook.py"
    program.write_text("\n\n".join(sources()), encoding="utf-8")
    done = run_program(program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "aten::mul.Tensor" in done.stdout
    assert re.search(r"scale 32768, 0 steps skipped", done.stdout), done.stdout
    assert len(words(done.stdout).split()) == pytest.approx(len(words(printed()).split()), rel=0.1)
