# SPDX-License-Identifier: Apache-2.0
"""Trains on scikit-learn's digits from Python and then from C++, and compares the two."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cmake_build import find_tool

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_ITERATIONS = 2000
LONGEST = 2_000_000  # iterations of a run that never reaches its target loss
# Of training in all, from Python and from C++, unless lengths are asked for: what CPUs compute in
# software takes up to a hundred times as long. The pace is measured beforehand and not exact: of
# the 90 s that the README promises, the plan leaves a part.
SECONDS = 70.0

# Loss by iteration, as published for this model, data and learning rate on a GPU under torch.amp.
PUBLISHED = {
    "fp16 + GradScaler": {
        100_000: 0.008138,
        200_000: 0.003054,
        300_000: 0.001745,
        400_000: 0.001183,
    },
    "fp32": {100_000: 0.008330, 200_000: 0.003190, 300_000: 0.001828, 400_000: 0.001242},
}


def marks_of(iterations: int, until_loss: float | None, shorter: Iterable[int] = ()) -> list[int]:
    """Returns the iterations whose loss is shown: also where shorter runs end, to compare all."""
    published = [mark for mark in PUBLISHED["fp32"] if mark <= iterations]
    if until_loss is not None:
        return [1, *published]
    parts = {1, iterations // 10, iterations // 2, iterations, *shorter, *published}
    return sorted(part for part in parts if part >= 1)


def lengths(pace: dict[str, float], iterations: int, seconds: float = SECONDS) -> dict[str, int]:
    """Returns the iterations of each mode, so that all of them together end in time.

    The slow modes are shortened, to the same time each.

    Args:
        pace: Milliseconds of an iteration, by mode.
        iterations: Of a mode that is fast enough.
        seconds: For both languages together.
    """
    found = {}
    left = 1e3 * seconds / 2
    for rank, mode in enumerate(sorted(pace, key=pace.__getitem__)):
        fitting = left / (len(pace) - rank) / max(pace[mode], 1e-6)
        # A round number, as a person would choose one.
        unit = 10 ** max(len(str(int(fitting))) - 2, 0)
        found[mode] = min(iterations, max(int(fitting) // unit * unit, 1))
        left -= found[mode] * pace[mode]
    return {mode: found[mode] for mode in pace}


def measure_pace(data: Path) -> dict[str, float]:
    """Returns the milliseconds of an iteration, by mode, as tools/demo_pace.py measures them."""
    command = [sys.executable, str(ROOT / "tools" / "demo_pace.py"), str(data)]
    document: dict[str, float] = json.loads(subprocess.check_output(command, env=environment()))
    return document


def announcement(iterations: dict[str, int], pace: dict[str, float]) -> str:
    """Returns what the whole demo will run, and how long that takes, about."""
    total = 2 * sum(iterations.values())
    seconds = 2e-3 * sum(pace[mode] * count for mode, count in iterations.items())
    parts = ", ".join(f"{mode} {count}" for mode, count in iterations.items())
    return (
        f"{total} iterations in all, about {max(round(seconds), 1)} s: "
        f"from Python and from C++ {parts}"
    )


def plan(options: argparse.Namespace, data: Path) -> list[str]:
    """Says what is to come; returns the lengths as the programs take them."""
    until_loss = options.until_loss
    if until_loss is not None:
        most = options.iters or LONGEST
        print(f"each run until its loss is {until_loss:g}, at most {most} iterations", flush=True)
        words = ["--iters", str(most), "--until-loss", repr(until_loss)]
        return [*words, "--marks", ",".join(map(str, marks_of(most, until_loss)))]
    pace = measure_pace(data)
    most = options.iters or DEFAULT_ITERATIONS
    iterations = dict.fromkeys(pace, most) if options.iters else lengths(pace, most)
    shorter = {mode: count for mode, count in iterations.items() if count < most}
    words = ["--iters", str(most)]
    if shorter:
        words += ["--shorter", ",".join(f"{mode}={count}" for mode, count in shorter.items())]
        print(
            f"slow here, so shorter than {most} iterations: "
            + ", ".join(f"{mode} {count}" for mode, count in shorter.items())
            + f"; compare losses of equal iterations; ITERS={most} runs all"
        )
    print(announcement(iterations, pace), flush=True)
    marks = marks_of(most, None, shorter.values())
    return [*words, "--marks", ",".join(map(str, marks))]


def environment() -> dict[str, str]:
    """Returns the environment of programs that train."""
    # Threads that wait by spinning make a step many times slower where other programs run too.
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}


def programs(build_dir: Path, data: Path) -> dict[str, list[str]]:
    """Builds the C++ program, if make has not; returns the command lines by language."""
    command = [find_tool("cmake"), "--build", str(build_dir), "--target", "digits"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{result.stdout}\nfastamp: the C++ program could not be built")
    python = str(ROOT / "examples" / "python" / "digits.py")
    native = str(build_dir / "examples" / "digits")
    return {"Python": [sys.executable, python, str(data)], "C++": [native, str(data)]}


def run(language: str, command: list[str], options: list[str], folder: Path) -> dict[str, Any]:
    """Runs one program and returns what it wrote beside its table."""
    output = folder / f"{'cpp' if language == 'C++' else 'python'}.json"
    print(f"\n{language}\n{'-' * len(language)}", flush=True)
    result = subprocess.run(
        [*command, *options, "--json", str(output)], env=environment(), check=False
    )
    if result.returncode != 0:
        raise SystemExit(f"fastamp: {language}: exit status {result.returncode}: {command}")
    document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return document


def compare_languages(results: dict[str, dict[str, Any]]) -> None:
    """Prints how far Python and C++ agree."""
    by_mode = zip(results["Python"]["rows"], results["C++"]["rows"], strict=True)
    print("Python and C++ from the same weights, largest difference of a printed loss:")
    for python, native in by_mode:
        pairs = [
            (loss, native["losses"][mark])
            for mark, loss in python["losses"].items()
            if mark in native["losses"]
        ]
        pairs.append((python["final_loss"], native["final_loss"]))
        print(f"  {python['mode']:18}{max(abs(a - b) for a, b in pairs):g}")


def compare_published(results: dict[str, dict[str, Any]]) -> None:
    """Prints our losses beside the published ones, at the iterations that were reached."""
    lines = []
    for language, result in results.items():
        for row in result["rows"]:
            for mark, published in PUBLISHED.get(row["mode"], {}).items():
                own = row["losses"].get(str(mark))
                if own is not None:
                    cells = f"{mark // 1000:>5}k  {published:.6f}  {own:.6f}  {own / published:.3f}"
                    lines.append(f"  {language:8}{row['mode']:18}{cells}")
    if lines:
        print("\nBeside the losses published for torch.amp on a GPU:")
        print(f"  {'language':8}{'mode':18}{'iter':>6}  published  fastamp   ratio")
        print("\n".join(lines))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, help="iterations of each run")
    parser.add_argument("--until-loss", type=float, help="train until this loss instead")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "demo", help="for files")
    options = parser.parse_args(arguments)
    if options.iters is not None and options.iters < 1:
        parser.error(f"argument --iters: expected at least 1, got {options.iters}")
    if options.until_loss is not None and not options.until_loss > 0:
        parser.error(f"argument --until-loss: expected more than 0, got {options.until_loss}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs both programs and compares them."""
    options = parse(arguments)
    build_dir = Path(os.environ.get("FASTAMP_BUILD_DIR", ROOT / "build" / "make"))
    options.folder.mkdir(parents=True, exist_ok=True)
    data = options.folder / "digits.pt"
    subprocess.run([sys.executable, ROOT / "examples" / "data" / "digits.py", data], check=True)
    commands = programs(build_dir, data)
    words = plan(options, data)
    results = {
        language: run(language, command, words, options.folder)
        for language, command in commands.items()
    }
    compare_languages(results)
    compare_published(results)
    print(f"\nAll numbers: {os.path.relpath(options.folder)}/python.json and cpp.json")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
