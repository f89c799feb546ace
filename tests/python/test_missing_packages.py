# SPDX-License-Identifier: Apache-2.0
"""A machine that lacks a test's package runs all other tests, and says what it left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.children import run_python

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Finder())
"""


def pytest_without(names, *arguments):
    """Runs pytest where these packages are not importable; a plugin is not even listed."""
    plugins = [word for name in names if name == "pytest_timeout" for word in ("-p", "no:timeout")]
    program = (
        BLOCKED.format(names=set(names)) + "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    options = ["-p", "no:cacheprovider", *plugins, f"--rootdir={ROOT}", f"-c{ROOT}/pyproject.toml"]
    return run_python("-c", program, *options, *map(str, arguments))


@pytest.mark.slow
def test_without_expecttest_every_file_is_collected_or_skipped_with_the_reason():
    found = pytest_without(["expecttest"], "--collect-only", "-q", "-rs", ROOT / "tests" / "python")
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr
    assert "error" not in found.stdout.splitlines()[-1]
    reason = "torch's tests: expecttest is not installed"
    skipped = re.findall(rf"^SKIPPED \[1\] (\S+?):\d+: {reason}$", found.stdout, re.MULTILINE)
    assert {Path(name).name for name in skipped} == {"test_torch_lists.py", "test_torch_cases.py"}
    assert "test_unscale_and_check.py::" in found.stdout


def test_a_test_that_needs_torchs_lists_is_skipped_alone():
    file = ROOT / "tests" / "python" / "autocast" / "test_tensor_kinds.py"
    found = pytest_without(["expecttest"], "--collect-only", "-q", file)
    assert found.returncode == 0, found.stdout
    assert "test_tensor_kinds.py::" in found.stdout


@pytest.mark.parametrize("file", ["ops/test_update_scale.py", "test_readme.py"])
def test_without_pytest_timeout_tests_have_no_limit_and_are_collected(file):
    found = pytest_without(["pytest_timeout"], "--collect-only", ROOT / "tests" / "python" / file)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "left out: time limits of Python tests: pytest-timeout is not installed" in found.stdout
    assert "warning" not in found.stdout.splitlines()[-1]


def test_it_is_blocked_indeed():
    found = run_python("-c", BLOCKED.format(names={"expecttest"}) + "import expecttest")
    assert found.returncode == 1
    assert "No module named 'expecttest'" in found.stderr
