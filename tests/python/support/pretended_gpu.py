# SPDX-License-Identifier: Apache-2.0
"""Stands in for python, ctest and compute-sanitizer where `make gpu` is rehearsed without a GPU.

Called as ``pretended_gpu.py <tool> <argument>...``. It writes down each call in
``$REHEARSAL/calls.jsonl``. Timings of rows are invented; the code that plans, saves, merges and
reports them is the real one, with ``$REHEARSAL`` as the tree it writes into.

``$REHEARSAL/behavior.json`` says what goes wrong: ``fail`` lists words of commands that end with 1,
and ``hang`` is the name of a row that never ends.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(os.environ.get("REHEARSAL", "."))
GPU = "Pretended GPU"
SKIPPED = (
    "SKIPPED [1] tests/python/optim/test_torch_cases.py:12: "
    "torch's tests: expecttest is not installed"
)


def note(**what: Any) -> None:
    with (HERE / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(what) + "\n")


def behavior() -> dict[str, Any]:
    path = HERE / "behavior.json"
    return json.loads(path.read_text()) if path.exists() else {}


def ctest(words: list[str]) -> None:
    if "--show-only=json-v1" in words:
        names = ["scaler_cuda", "autocast_cuda"]
        print(json.dumps({"tests": [{"name": n, "command": [f"fastamp_test_{n}"]} for n in names]}))
    else:
        print("100% tests passed, 0 tests failed out of 2")


def facts_of(quick: bool) -> dict[str, dict[str, float]]:
    from benchmarks.harness import BASELINE, FASTAMP
    from benchmarks.pages import COUNTS, MEMORY, QUALITY
    from benchmarks.rows.weight_copies import NO_COPIES
    from benchmarks.training import FP32, TF32

    del quick
    names = (*COUNTS, *MEMORY, *QUALITY)
    return {who: dict.fromkeys(names, 3.0) for who in (BASELINE, FASTAMP, NO_COPIES, FP32, TF32)}


def measured(row: Any, effort: Any) -> Any:
    """Invents what measuring a row gives: fastamp at half of torch.amp's time."""
    from benchmarks import harness
    from benchmarks.rows.float8 import BF16_PRODUCTS, FLOAT8_PRODUCTS
    from benchmarks.rows.weight_copies import NO_COPIES
    from benchmarks.training import FP32, TF32

    del effort
    if row.name == behavior().get("hang"):
        time.sleep(600)
    note(row=row.name)
    times = {harness.BASELINE: 2e6, harness.FASTAMP: 1e6, "foreach mul": 1e6, NO_COPIES: 1.5e6}
    times |= {FP32: 4e6, TF32: 3e6, BF16_PRODUCTS: 5e5, FLOAT8_PRODUCTS: 4e5}
    if row.copy_bytes:
        times[harness.COPY] = row.copy_bytes / 4000  # 4000 GB/s
        times[harness.FASTAMP] = row.bytes_moved / 3600
    samples = {name: [factor * each for factor in (1.0, 1.1, 1.2)] for name, each in times.items()}
    result = harness.Result(row.name, 1, samples, row.bytes_moved)
    result.group, result.device, result.clock = row.group, row.device, row.clock
    result.curve, result.work = row.curve, row.work
    result.passes, result.copy_bytes = row.passes, row.copy_bytes
    result.facts = facts_of(True) if row.facts is not None else {}
    harness.judge(result, row.goal)
    return result


def benchmarks(words: list[str]) -> None:
    """Runs the real programs of benchmarks/, which write below $REHEARSAL."""
    from benchmarks import environment

    environment.ROOT = HERE
    if words[1:2] not in (["merge"], []):
        from benchmarks import run

        described = environment.describe()
        run.describe = lambda: {**described, "gpu": GPU}
        run.measure = measured
    sys.argv = ["benchmarks", *words[1:]]
    runpy.run_module(
        "benchmarks.__main__" if words[0] == "benchmarks" else words[0], None, "__main__"
    )


def python(words: list[str]) -> None:
    if words[0] == "-c":
        print(GPU)
    elif words[1] == "pytest":
        print(f"{SKIPPED}\n7 passed, 1 skipped in 0.01s")
    elif words[1].startswith("benchmarks"):
        benchmarks(words[1:])
    else:
        print(f"built by {Path(words[0]).name}")


def main() -> None:
    tool, *words = sys.argv[1:]
    uncached = "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ
    note(tool=tool, words=words, uncached=uncached)
    wrong = [word for word in behavior().get("fail", []) if word in words]
    if wrong:
        print(f"pretended failure of {wrong[0]}")
        sys.exit(1)
    if tool == "ctest":
        ctest(words)
    elif tool == "python":
        python(words)
    else:
        print("========= ERROR SUMMARY: 0 errors")


if __name__ == "__main__":
    main()
