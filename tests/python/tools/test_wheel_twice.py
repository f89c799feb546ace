# SPDX-License-Identifier: Apache-2.0
"""tools/wheel_twice.py: in what two wheels differ."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import wheel_twice  # noqa: E402

FILES = {"a.py": "1", "b.so": "2"}
TIME = (2030, 1, 1, 0, 0, 0)


def make_wheel(path: Path, files: dict[str, str], time: tuple[int, ...] = TIME) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(zipfile.ZipInfo(name, time), text)
    return path


@pytest.mark.parametrize(
    ("files", "time", "found"),
    [
        (FILES, TIME, []),
        (FILES | {"b.so": "3"}, TIME, ["b.so: other bytes"]),
        (FILES | {"c.py": ""}, TIME, ["c.py: in one of them alone", "files in another order"]),
        (FILES, (2031, 1, 1, 0, 0, 0), ["a.py: another time", "b.so: another time"]),
        (dict(reversed(FILES.items())), TIME, ["files in another order"]),
    ],
)
def test_what_differs_is_named(tmp_path, monkeypatch, files, time, found):
    monkeypatch.setenv("PATH", "")  # without diffoscope
    one, other = make_wheel(tmp_path / "1.whl", FILES), make_wheel(tmp_path / "2.whl", files, time)
    expected = [*found, "1.whl: other bytes"] if found else []
    assert list(wheel_twice.differences(one, other)) == expected
