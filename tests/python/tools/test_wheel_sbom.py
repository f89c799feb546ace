# SPDX-License-Identifier: Apache-2.0
"""tools/wheel_sbom.py: what a wheel's bill of materials names."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

try:
    import wheel_sbom
except ImportError:
    wheel_sbom = None

pytestmark = pytest.mark.skipif(
    wheel_sbom is None, reason="cyclonedx-python-lib is of the extra `wheel`"
)

# What a build writes, of another torch.
INFO = {
    **json.loads((ROOT / "cmake" / "build_info.json.in").read_text(encoding="utf-8")),
    "torch_version": "2.15.0",
    "cuda_version": "",
}
FILES = {
    "fastamp/__init__.py": b"",
    "fastamp/_native/torch2.15/build_info.json": json.dumps(INFO).encode(),
    "fastamp/_native/torch2.15/lib/libfastamp.so.0.1": b"library",
    "fastamp/_native/torch2.15/_C.cpython-312-x86_64-linux-gnu.so": b"module",
    "fastamp-0.1.0.dist-info/METADATA": b"Name: fastamp\nVersion: 0.1.0\n"
    b"Requires-Dist: torch<2.16,>=2.15\nRequires-Dist: ruff==1; extra == 'lint'\n",
}


def make_wheel(folder: Path, **changed: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "fastamp-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in FILES.items():
            stamped = zipfile.ZipInfo(name, (2030, 1, 1, 0, 0, 0))
            wheel.writestr(stamped, changed.get(Path(name).suffix[1:], content))
    return path


def test_libraries_requirements_and_the_wheel_itself_are_named(tmp_path):
    wheel = make_wheel(tmp_path)
    bill = json.loads(wheel_sbom.bill_of(wheel))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    whole = bill["metadata"]["component"]
    assert (whole["name"], whole["version"]) == ("fastamp", "0.1.0")
    assert whole["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    parts = {each["name"]: each for each in bill["components"]}
    assert sorted(parts) == [
        "fastamp/_native/torch2.15/_C.cpython-312-x86_64-linux-gnu.so",
        "fastamp/_native/torch2.15/lib/libfastamp.so.0.1",
        "torch",
    ]
    library = parts["fastamp/_native/torch2.15/lib/libfastamp.so.0.1"]
    assert library["hashes"][0]["content"] == hashlib.sha256(b"library").hexdigest()
    facts = {each["name"]: each["value"] for each in library["properties"]}
    assert facts == {
        "fastamp:torch": "2.15.0",
        "fastamp:cuda": "none",
        "fastamp:compiler": INFO["compiler"],
    }
    assert parts["torch"]["purl"] == "pkg:pypi/torch"


def test_equal_wheels_have_equal_bills_and_others_have_others(tmp_path):
    one, same = make_wheel(tmp_path / "a"), make_wheel(tmp_path / "b")
    assert wheel_sbom.bill_of(one) == wheel_sbom.bill_of(same)
    other = make_wheel(tmp_path / "c", so=b"another")
    assert wheel_sbom.bill_of(one) != wheel_sbom.bill_of(other)


def test_a_library_outside_of_all_parts_is_refused(tmp_path):
    wheel = make_wheel(tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("fastamp/lib/libextra.so", b"")
    with pytest.raises(KeyError, match="build_info"):
        wheel_sbom.bill_of(wheel)
