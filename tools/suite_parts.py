# SPDX-License-Identifier: Apache-2.0
"""What `make test` runs, what only `make test-all` runs, and which of that a change can touch.

`make test` tests the product. The other parts guard what is around it, or take long. A test belongs
to the part of the longest path here that it begins with; a changed file concerns the parts of the
longest path that it begins with. tests/python/tools/test_suite_parts.py checks that both tables
know every file of the repository.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = "product"

#: The parts of `make test-all` beside the product, and what they are.
PARTS = {
    "long": "tests of the product that are marked long, and make simcuda",
    "flavours": "emulated kernels without a sanitizer and under ThreadSanitizer; nvcc's code",
    "packages": "programs that users compile, the package and its ways of installation",
    "libraries": "Accelerate, Lightning, transformers, timm; the demo and the example programs",
    "workshop": "tools and benchmarks",
}
ALL = frozenset(PARTS)

#: The part of each test file, by the beginning of its path.
TESTS = {
    "tests/python": PRODUCT,
    "tests/simulated_cuda": PRODUCT,
    "tests/python/benchmarks": "workshop",
    "tests/python/examples": "libraries",
    "tests/python/examples/test_cpp_examples.py": "packages",
    "tests/python/inference/test_onnx.py": "libraries",
    "tests/python/inference/test_serving.py": "packages",
    "tests/python/kernels/test_cuda_code.py": "flavours",
    "tests/python/packaging": "packages",
    "tests/python/simulated_cuda/test_make_simcuda.py": "long",
    "tests/python/test_cpp_guide.py": "packages",
    "tests/python/test_demo.py": "libraries",
    "tests/python/test_missing_packages.py": "workshop",
    "tests/python/test_readme.py": "packages",
    "tests/python/thirdparty": "libraries",
    "tests/python/tools": "workshop",
}

#: Tests of several ranks, in processes or simulated, and of comparing runs; a test bounds the sum.
RANKS = (
    "tests/python/debugging/test_compare.py",
    "tests/python/distributed",
    "tests/python/examples/test_python_examples.py",
    "tests/python/nets/test_rank_histories.py",
    "tests/python/optim/test_moments_in_8_bits_ranks.py",
    "tests/python/optim/test_muon_shards.py",
    "tests/python/optim/test_remainders.py",
    "tests/python/optim/test_shards.py",
    "tests/python/optim/test_state_rounding_ranks.py",
    "tests/python/scaler/test_collectives.py",
    "tests/python/scaler/test_guarded_ranks.py",
    "tests/python/scaler/test_process_group.py",
    "tests/python/scaler/test_rank_reports.py",
    "tests/python/scaler/test_sharded_steps.py",
    "tests/python/test_rl_guide.py",
    "tests/python/thirdparty/test_ranks.py",
)

_NATIVE = frozenset({"long", "flavours", "packages", "libraries"})
_PROGRAMS = frozenset({"long", "packages", "libraries"})
_TEXT = frozenset({"packages", "workshop"})  # guides that are programs, and the site

#: The parts that a changed file can touch, by the beginning of its path. The product is always run.
TOUCHED: dict[str, frozenset[str]] = {
    ".ci": frozenset({"workshop"}),
    ".clang-format": frozenset(),
    ".clang-tidy": frozenset(),
    ".gersemirc": frozenset(),
    ".github": frozenset({"workshop"}),
    ".gitignore": frozenset({"packages"}),
    ".pre-commit-config.yaml": frozenset({"workshop"}),
    "CHANGELOG.md": _TEXT,
    "CMakeLists.txt": ALL,
    "CMakePresets.json": ALL,
    "CONTRIBUTING.md": frozenset({"workshop"}),
    "LICENSE": frozenset({"packages"}),
    "MANIFEST.in": frozenset({"packages"}),
    "Makefile": ALL,
    "README.md": _TEXT,
    "SECURITY.md": frozenset(),
    "VERSION": ALL,
    "benchmarks": frozenset({"workshop"}),
    "cmake": ALL,
    "docs": _TEXT,
    "examples": frozenset({"packages", "libraries", "workshop"}),
    "include": ALL,
    "mkdocs.yml": frozenset({"workshop"}),
    "packaging": frozenset({"packages"}),
    "pyproject.toml": ALL,
    "python": ALL,
    "setup.py": frozenset({"packages"}),
    "src": ALL,
    "src/kernels/cuda": frozenset({"flavours", "packages", "workshop"}),
    "tests/README.md": frozenset(),
    "tests/consumer": frozenset({"packages"}),
    "tests/cpp": frozenset(),
    "tests/cpp/cuda_on_cpu": frozenset({"flavours", "workshop"}),
    "tests/cpp/support": frozenset({"flavours"}),
    "tests/data": frozenset(),
    "tests/mutants_at_random.jsonl": frozenset(),
    "tests/python": frozenset({"long"}),
    "tests/python/benchmarks": frozenset({"workshop"}),
    "tests/python/conftest.py": ALL,
    "tests/python/examples": _PROGRAMS,
    "tests/python/inference": _PROGRAMS,
    "tests/python/kernels": frozenset({"flavours", "long"}),
    "tests/python/packaging": _PROGRAMS,
    "tests/python/support": ALL,
    "tests/python/test_cpp_guide.py": frozenset({"packages"}),
    "tests/python/test_demo.py": frozenset({"libraries"}),
    "tests/python/test_missing_packages.py": frozenset({"workshop"}),
    "tests/python/test_readme.py": frozenset({"packages"}),
    "tests/python/thirdparty": frozenset({"libraries"}),
    "tests/python/tools": frozenset({"workshop"}),
    "tests/costs.tsv": frozenset({"workshop"}),
    "tests/simulated_cuda": ALL,
    "tools": frozenset({"workshop"}),
    "tools/cmake_build.py": ALL,
    "tools/demo.py": frozenset({"libraries", "workshop"}),
    "tools/demo_pace.py": frozenset({"libraries", "workshop"}),
    "tools/patience.py": ALL,
    "tools/run_tests.py": ALL,
    "tools/suite_parts.py": ALL,
    "tools/suite_queue.py": ALL,
}

Value = TypeVar("Value")


def of_longest(table: Mapping[str, Value], path: str) -> Value | None:
    """Returns the value of the longest key that a path begins with; None if no key does."""
    parts = path.split("/")
    begins = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((table[begin] for begin in begins if begin in table), None)


def touched(paths: Iterable[str]) -> frozenset[str]:
    """Returns the parts that changes of files can touch: all, if a file is in no table."""
    found: frozenset[str] = frozenset()
    for path in paths:
        parts = of_longest(TOUCHED, path)
        found |= ALL if parts is None else parts
    return found


def _git(*words: str) -> list[str] | None:
    """Returns what git prints, by line; None if it fails."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def base() -> str | None:
    """Returns the commit that a change begins at; None if that is not known.

    It is FASTAMP_BASE where that is set, else where this branch left the branch that it is for. On
    that branch itself nothing says where a change begins.
    """
    target = os.environ.get("FASTAMP_BASE")
    if not target and os.environ.get("GITHUB_BASE_REF"):
        target = f"origin/{os.environ['GITHUB_BASE_REF']}"
    found = _git("merge-base", "HEAD", target or "origin/main")
    head = _git("rev-parse", "HEAD")
    return found[0] if found and found != head else None


def changed() -> list[str] | None:
    """Returns the files that differ from the base, also those not committed; None if unknown."""
    begin = base()
    if begin is None:
        return None
    # Without renames: the old name counts too.
    committed = _git("diff", "--name-only", "--no-renames", begin)
    added = _git("ls-files", "--others", "--exclude-standard")
    return None if committed is None or added is None else sorted({*committed, *added})
