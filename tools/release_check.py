# SPDX-License-Identifier: Apache-2.0
"""Runs everything that has to be right before a release, and says what failed.

Each step writes its output to build/release/NAME.log; one that fails does not keep the next from
running. The whole takes hours; --only and --list help. Nothing is published.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "release"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# Those that the wheel has parts for.
TORCHES = " ".join(re.findall(r"^TORCHES \?= (.+)$", MAKEFILE, re.MULTILINE)).split()
PYTHON = Path(sys.executable).parent


def wrong_versions(root: Path) -> Iterator[str]:
    """Yields what does not agree with the file VERSION.

    Args:
        root: The repository.
    """
    version = (root / "VERSION").read_text(encoding="utf-8").strip()
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"VERSION: expected three numbers, got {version!r}"
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = next(iter(re.findall(r"^## (.*)$", changes, re.MULTILINE)), "nothing")
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d{{2}}-\d{{2}}\)", heading):
        yield f"CHANGELOG.md: expected {version} and a date as the first heading, got {heading!r}"
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        for tag in re.findall(r"\bGIT_TAG v([\d.]+\d)", page.read_text(encoding="utf-8")):
            if tag != version:
                yield f"{page.name}: expected GIT_TAG v{version}, got v{tag}"


def uncommitted(root: Path) -> Iterator[str]:
    """Yields the files that the commit to be released would lack."""
    command = ["git", "status", "--porcelain"]
    yield from subprocess.check_output(command, cwd=root, text=True).splitlines()


def _make(*arguments: str) -> list[str]:
    return ["make", *arguments]


def _preset(name: str) -> list[str]:
    tools = {tool: str(PYTHON / tool) for tool in ("cmake", "ctest")}
    parts = [f"{tools['cmake']} --preset {name}", f"{tools['cmake']} --build --preset {name}"]
    return ["sh", "-c", " && ".join([*parts, f"{tools['ctest']} --preset {name}"])]


@dataclass(frozen=True)
class Step:
    """A part of the check.

    Attributes:
        name: How --only names it.
        what: What a person reads of it.
        work: A command, or a function that yields what is wrong.
    """

    name: str
    what: str
    work: list[str] | Callable[[Path], Iterator[str]]


STEPS = (
    Step("versions", "one version everywhere, a dated changelog", wrong_versions),
    Step("committed", "nothing that is not committed", uncommitted),
    Step("lint", "formatters, linters, type checks", _make("lint")),
    Step("test", "all C++ and Python tests", _make("test-all")),
    Step("torch-watch", "torch's code is as somebody has looked at it", _make("torch-watch")),
    Step("emulate-long", "CUDA kernels on the CPU, all cases", _make("emulate-long")),
    Step("asan", "C++ tests under AddressSanitizer", _preset("asan")),
    Step("tsan", "C++ tests under ThreadSanitizer", _preset("tsan")),
    *(
        Step(f"torch-{torch}", f"make test with torch {torch}", _make("compat", f"TORCH={torch}"))
        for torch in TORCHES
    ),
    Step("aarch64", "C++ tests and some of Python for 64-bit Arm, under qemu", _make("aarch64")),
    Step("wheel", "one wheel for all torches", _make("wheel")),
    Step(
        "wheel-test",
        "the wheel in fresh environments",
        _make("wheel-test"),
    ),
    Step(
        "wheel-twice",
        "two builds in two folders give the same bytes",
        [sys.executable, "tools/wheel_twice.py"],
    ),
    Step("mutants", "breaks of CUDA kernels and host code are noticed", _make("mutants")),
    Step("docs", "the site, without a warning", _make("docs")),
    Step("demo", "training in all precisions, both languages", _make("demo")),
    Step("bench", "benchmark beside torch.amp", _make("bench")),
)


def run(step: Step, log: Path) -> bool:
    """Runs a step; returns whether all is well. Everything it says goes to the log."""
    if callable(step.work):
        found = list(step.work(ROOT))
        log.write_text("\n".join(found), encoding="utf-8")
        return not found
    with log.open("wb") as output:
        done = subprocess.run(
            step.work, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    return done.returncode == 0


def last_words(log: Path, count: int = 5) -> str:
    """Returns the last lines of a log that say something, indented."""
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in lines[-count:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every step passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [step.name for step in STEPS]
    parser.add_argument("--only", action="append", choices=names, help="this step; repeatable")
    parser.add_argument("--list", action="store_true", help="only name the steps")
    options = parser.parse_args(arguments)
    chosen = [step for step in STEPS if not options.only or step.name in options.only]
    if options.list:
        print("\n".join(f"{step.name:<14}{step.what}" for step in chosen))
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = []
    for number, step in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {step.name:<14}{step.what} ... ", end="", flush=True)
        start = time.monotonic()
        log = LOGS / f"{step.name}.log"
        passed = run(step, log)
        print(f"{'ok' if passed else 'FAILED'}, {time.monotonic() - start:.0f} s", flush=True)
        if not passed:
            failed.append(step.name)
            print(f"{last_words(log)}\n    (all of it: {log.relative_to(ROOT)})", flush=True)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} passed", end="")
    print(f"; failed: {', '.join(failed)}" if failed else ": ready for release")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
