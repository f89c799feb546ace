# SPDX-License-Identifier: Apache-2.0
"""The report of a run is written when the interpreter exits, however it does."""

from __future__ import annotations

import json

import pytest

from fastamp._cli import report_command
from support.children import run_program

RUN = """
import sys, torch, fastamp, fastamp._cli.report_command, os
fastamp._cli.report_command.start(sys.argv[1])
os.chdir("/")
with fastamp.autocast("cpu"):
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1 / 0"])
def test_the_report_is_written_at_exit(tmp_path, end):
    file = tmp_path / "report.json"
    done = run_program("-c", RUN + end, str(file))
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3, "1 / 0": 1}[end]
    record = json.loads(file.read_text())
    (row,) = record["ops"]
    assert (row["op"], row["calls"], row["source"]) == ("mm", 1, "<string>:6")


def test_other_names_get_the_table(tmp_path):
    file = tmp_path / "report.txt"
    assert run_program("-c", RUN, str(file)).returncode == 0
    assert "mm" in file.read_text()
    assert file.read_text().startswith("---")


def test_a_file_that_cannot_be_written_is_found_out_at_once(tmp_path):
    with pytest.raises(OSError, match="absent"):
        report_command.start(tmp_path / "absent" / "report.json")
