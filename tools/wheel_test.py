# SPDX-License-Identifier: Apache-2.0
"""Installs the wheel in fresh environments, and uses it as its users would.

wheel_test.py --torch 2.11.0 --torch 2.15.0 --python 3.12: each torch beside this Python and beside
each other one. pip finds no compiler. Then a model is trained, a program runs with fastamp in
torch's place, and a C++ program is built with find_package and run. An environment takes 5 GB and
is removed when it has been tested (--keep), which takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from build_wheel import DIST, WORK, find_pythons, pythons_with
from cmake_build import ROOT, find_tool
from setup_venv import read_pyproject

ITERATIONS = "200"
DROP_IN = """
import fastamp.torch as torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu")
for step in range(100):
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    first = loss.item() if step == 0 else first
import fastamp
assert torch.amp.GradScaler is fastamp.GradScaler
assert loss.item() < first / 20, (first, loss.item())
print(f"loss {first:.3f} -> {loss.item():.3f}")
"""


def call(command: Sequence[str | Path], path: str | None = None) -> str:
    """Runs a command outside this checkout's own package and returns what it printed.

    Args:
        command: Its words.
        path: The PATH it runs with; None for fastamp's.

    Raises:
        RuntimeError: It failed; with the end of its output.
    """
    own = ("PYTHONPATH", "LD_LIBRARY_PATH", "CMAKE_PREFIX_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=WORK,
        env=environment | ({} if path is None else {"PATH": path}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command[:3]))}: {done.stdout[-2000:]}")
    return done.stdout


def install(folder: Path, interpreter: str, torch: str, wheel: Path) -> str:
    """Installs torch and the wheel where no compiler is found; returns what the wheel says.

    Raises:
        RuntimeError: pip failed, or the code for CUDA could not be opened beside a torch with CUDA.
    """
    shutil.rmtree(folder, ignore_errors=True)
    call([interpreter, "-m", "venv", folder])
    python = folder / "bin" / "python"
    demo = read_pyproject()["project"]["optional-dependencies"]["demo"]
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    call([*pip, "--only-binary", ":all:", f"torch=={torch}", *demo, wheel], str(folder / "bin"))
    ask = (
        "import fastamp, platform, torch; i = fastamp.build_info();"
        "print(platform.python_version(), i['torch_version'], i['cuda_version']);"
        "both = i['cuda_version'] and torch.version.cuda;"
        "print(fastamp._C.why_no_cuda_part() if both else '')"
    )
    facts, why_not = call([python, "-c", ask]).split("\n")[:2]
    if why_not:
        raise RuntimeError(f"the code for CUDA cannot be used: {why_not}")
    version, built, *cuda = facts.split()
    code = f"CUDA {cuda[0]}" if cuda else "CPU alone"
    return f"Python {version}, built for torch {built}, {code}"


def train(folder: Path) -> str:
    """Trains digits in all precisions; returns what the loss became.

    Raises:
        RuntimeError: It did not fall by a tenth in one of them, or ended far from that of fp32.
    """
    python, data, table = folder / "bin" / "python", folder / "digits.pt", folder / "digits.json"
    examples = ROOT / "examples"
    call([python, examples / "data" / "digits.py", data])
    program = [python, examples / "python" / "digits.py", data]
    call([*program, "--iters", ITERATIONS, "--marks", f"1,{ITERATIONS}", "--json", table])
    rows = json.loads(table.read_text(encoding="utf-8"))["rows"]
    first, last = rows[0]["losses"]["1"], {row["mode"]: row["final_loss"] for row in rows}
    said = f"loss {first:.3f} -> " + ", ".join(f"{mode} {loss:.3f}" for mode, loss in last.items())
    if not all(
        loss < 0.9 * first and abs(loss / last["fp32"] - 1) < 0.05 for loss in last.values()
    ):
        raise RuntimeError(said)
    return said


def drop_in(folder: Path) -> str:
    """Trains with fastamp in torch's place."""
    return call([folder / "bin" / "python", "-c", DROP_IN]).strip()


def consume(folder: Path) -> str:
    """Builds tests/consumer with find_package, with the folders that the package names."""
    python, build = folder / "bin" / "python", folder / "consumer"
    ask = (
        "import torch, fastamp; print(torch.utils.cmake_prefix_path, fastamp.cpp.cmake_prefix_path)"
    )
    prefixes = ";".join(call([python, "-c", ask]).split())
    cmake = find_tool("cmake")
    options = [f"-DCMAKE_PREFIX_PATH={prefixes}", "-DCMAKE_BUILD_TYPE=Debug"]
    options += ["-DCMAKE_DISABLE_FIND_PACKAGE_Python3=ON", "-GNinja"]
    options.append(f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}")
    call([cmake, "-S", ROOT / "tests" / "consumer", "-B", build, *options])
    call([cmake, "--build", build, "--target", "consumer"])
    return call([build / "consumer"]).strip()


def check(
    torch: str, interpreter: str, wheel: Path, keep: bool
) -> list[tuple[str, str, float, bool]]:
    """Returns (what, what was seen, seconds, whether it worked) for a torch and a Python."""
    folder = WORK / "test" / torch
    steps: dict[str, Callable[[], str]] = {
        "install": lambda: install(folder, interpreter, torch, wheel),
        "digits": lambda: train(folder),
        "drop-in": lambda: drop_in(folder),
        "C++ program": lambda: consume(folder),
    }
    rows = []
    for what, work in steps.items():
        begin = time.monotonic()
        try:
            seen, worked = work(), True
        except (RuntimeError, OSError) as error:
            seen, worked = str(error), False
        rows.append((what, seen, time.monotonic() - begin, worked))
        print(f"torch {torch}: {what}: {'ok' if worked else 'FAILED'}: {seen}", flush=True)
        if what == "install" and not worked:
            break
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def newest_wheel() -> Path:
    """Returns the wheel that was built last.

    Raises:
        SystemExit: There is none.
    """
    wheels = sorted(DIST.glob("fastamp-*-py3-none-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        raise SystemExit(f"fastamp: no wheel in {DIST}: make wheel builds it")
    return wheels[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if all of it worked with every torch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", action="append", required=True, help="e.g. 2.15.0; repeatable")
    parser.add_argument("--python", action="append", default=[], help="e.g. 3.12; repeatable")
    parser.add_argument("--keep", action="store_true", help="leave the environments there")
    options = parser.parse_args(arguments)
    wheel = newest_wheel()
    WORK.mkdir(parents=True, exist_ok=True)
    pythons = [sys.executable, *find_pythons(options.python)]
    cases = [(torch, python) for torch in options.torch for python in pythons_with(torch, pythons)]
    table = [(case[0], check(*case, wheel, options.keep)) for case in cases]
    print(f"\n{wheel.name}")
    print("| torch | what | seconds | result |\n|---|---|---|---|")
    for torch, rows in table:
        for what, seen, seconds, worked in rows:
            result = seen.splitlines()[-1] if worked else "failed"
            print(f"| {torch} | {what} | {seconds:.0f} | {result} |")
    return int(not all(row[3] for _, rows in table for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
