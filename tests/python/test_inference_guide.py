# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of docs/inference.md are one program, which is run as a reader would."""

from __future__ import annotations

import re
from pathlib import Path

from support.children import check_python

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "inference.md"


def test_the_guides_program_runs(tmp_path: Path):
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    program = tmp_path / "guide.py"
    program.write_text("\n".join(blocks), encoding="utf-8")
    printed = check_python("-W", "ignore", str(program))
    assert "4 of 6 parameters in bfloat16" in printed
    assert "as the policies of its ops want it: 1 fp32, 2 lower" in printed
