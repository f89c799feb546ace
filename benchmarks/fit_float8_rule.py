# SPDX-License-Identifier: Apache-2.0
"""Fits the constants of the rule that says which products pay in fp8 to a GPU, and writes them.

    python -m benchmarks.fit_float8_rule                  measures on this GPU, for minutes
    python -m benchmarks.fit_float8_rule --samples FILE   fits what was measured before
    python -m benchmarks.fit_float8_rule --dry-run        makes samples of --gpu up, writes nothing

Measured are products in bfloat16 and in fp8, the casts that regions make, to bfloat16 and to fp8 in
both layouts, and what an fp8 layer takes of the host. The
samples go to build/float8_samples.json, the fitted entry to src/autocast/float8_constants.h.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastamp
import fastamp._C as _C
from benchmarks.environment import describe

ROOT = Path(__file__).resolve().parent.parent
CONSTANTS = ROOT / "src" / "autocast" / "policy" / "float8_constants.h"
SAMPLES = ROOT / "build" / "float8_samples.json"
FITTED = ("carrier_rate", "float8_rate", "bandwidth", "launch_seconds", "min_work")
LINE_LENGTH = 100

# Rows, depth and columns: products of models from 768 to 8192 wide.
WIDTHS = (768, 1024, 1600, 2048, 4096, 8192)
ROWS = (2048, 8192, 16384)
CAST_ELEMENTS = tuple(2**power for power in range(18, 29))
CASTS = (
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e4m3fn),
)
HOST_CALLS = 200
REPEATS = 15


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        kind: ``carrier`` or ``float8`` for a product, ``cast`` for a cast, ``host`` for the forward
            pass of a small fp8 layer by the host's clock.
        sizes: Rows, depth and columns of a product; of a cast the bytes read and written, and the
            launches.
        seconds: Median time.
    """

    kind: str
    sizes: tuple[int, ...]
    seconds: float


def shapes() -> list[tuple[int, int, int]]:
    """Returns rows, depth and columns of y, dX and dW of square layers and of 4:1 layers."""
    layers = [(m, k, n) for m in ROWS for k in WIDTHS for n in (k, 4 * k) if n <= 16384]
    return [shape for m, k, n in layers for shape in ((m, k, n), (m, n, k), (n, m, k))]


def cast_sizes(count: int, source: torch.dtype, to: torch.dtype) -> tuple[int, int]:
    """Returns the bytes that a cast reads and writes, and its launches.

    To fp8 a matrix is read for its range and then to cast it, and written in two layouts.
    """
    if to.itemsize > 1:
        return count * (source.itemsize + to.itemsize), 1
    return count * (2 * source.itemsize + 2), 2


def traffic(kind: str, sizes: Sequence[int]) -> float:
    """Returns the bytes of a product's operands, and of its result in 16 bits."""
    rows, depth, columns = sizes
    item = 2 if kind == "carrier" else 1
    return item * depth * (rows + columns) + 2 * rows * columns


def model_seconds(constants: dict[str, Any], kind: str, sizes: Sequence[int]) -> float:
    """Returns what the model says of a product or a cast, to compare with what was measured."""
    if kind == "cast":
        moved, launches = sizes
        return float(moved / constants["bandwidth"] + launches * constants["launch_seconds"])
    rows, depth, columns = sizes
    work = _C.float8_product_work(rows, columns, depth, constants["multiprocessors"])
    moving = traffic(kind, sizes) / constants["bandwidth"]
    computing = work / constants[f"{kind}_rate"] + _C.float8_traffic_share * moving
    return float(max(computing, moving) + constants["launch_seconds"])


def _least_squares(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients with the least sum of squares of relative errors, none negative."""
    weights = 1 / np.asarray(seconds)
    matrix = np.asarray(columns).T * weights[:, None]
    scale = np.abs(matrix).max(axis=0)
    found = np.linalg.lstsq(matrix / scale, np.ones(len(seconds)), rcond=None)[0] / scale
    return [max(float(value), 0.0) for value in found]


def fit(samples: Sequence[Sample], multiprocessors: int) -> dict[str, float]:
    """Fits the constants: bandwidth and launches to casts, then each rate to its products.

    Args:
        samples: At least two casts, one product of each kind and one of the host.
        multiprocessors: Of the GPU that they are from.

    Raises:
        ValueError: A kind of sample is missing, or the casts show no bandwidth.
    """
    by_kind: dict[str, list[Sample]] = {}
    for sample in samples:
        by_kind.setdefault(sample.kind, []).append(sample)
    for kind, least in (("cast", 2), ("carrier", 1), ("float8", 1), ("host", 1)):
        if len(by_kind.get(kind, [])) < least:
            raise ValueError(f"fit: expected at least {least} samples of kind {kind!r}, got fewer")
    casts = by_kind["cast"]
    per_byte, launch = _least_squares(
        list(zip(*(sample.sizes for sample in casts), strict=True)),
        [sample.seconds for sample in casts],
    )
    if per_byte == 0:
        raise ValueError("fit: expected larger casts to take longer, got the opposite")
    constants = {"bandwidth": 1 / per_byte, "launch_seconds": launch}
    for kind in ("carrier", "float8"):
        constants[f"{kind}_rate"] = _rate(by_kind[kind], constants, kind, multiprocessors)
    # What the GPU does in 16 bits while the host launches the layer.
    host = statistics.median(sample.seconds for sample in by_kind["host"])
    constants["min_work"] = host * constants["carrier_rate"]
    return constants


def _rate(
    samples: Sequence[Sample], constants: dict[str, float], kind: str, multiprocessors: int
) -> float:
    """FLOP/s of the products that computing bounds, by the model, at the rate found."""
    points = []
    for sample in samples:
        rows, depth, columns = sample.sizes
        moving = traffic(kind, sample.sizes) / constants["bandwidth"]
        busy = sample.seconds - constants["launch_seconds"]
        computing = busy - _C.float8_traffic_share * moving
        if computing > 0 and busy > 1.05 * moving:
            work = _C.float8_product_work(rows, columns, depth, multiprocessors)
            points.append((work / sample.seconds, computing / sample.seconds))
    if not points:
        raise ValueError(f"fit: expected a {kind!r} product that computing bounds, got none")
    # Least squares of the relative errors of the whole time, through the origin.
    return sum(x * x for x, _ in points) / sum(x * y for x, y in points)


def synthetic(
    constants: dict[str, Any], noise: float, seed: int = 0, host_seconds: float | None = None
) -> list[Sample]:
    """Returns what the model of these constants would measure, each time off by some noise."""
    numbers = random.Random(seed)

    def sample(kind: str, sizes: tuple[int, ...], seconds: float) -> Sample:
        return Sample(kind, sizes, seconds * (1 + numbers.uniform(-noise, noise)))

    host = host_seconds or constants["min_work"] / constants["carrier_rate"]
    products = [
        sample(kind, shape, model_seconds(constants, kind, shape))
        for kind in ("carrier", "float8")
        for shape in shapes()
    ]
    casts = [
        sample("cast", sizes, model_seconds(constants, "cast", sizes))
        for count in CAST_ELEMENTS
        for sizes in (cast_sizes(count, *dtypes) for dtypes in CASTS)
    ]
    return [*products, *casts, sample("host", (), host)]


def _timed(call: Callable[[], Any]) -> float:
    """Median seconds on the GPU of a call, with an L2 cache that holds something else."""
    flush = torch.empty(
        2 * torch.cuda.get_device_properties().L2_cache_size, dtype=torch.uint8, device="cuda"
    )
    call()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _float8_product(rows: int, depth: int, columns: int, fast: bool) -> Callable[[], torch.Tensor]:
    a = torch.randn(rows, depth, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(columns, depth, device="cuda").to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _host_seconds() -> float:
    """What the host takes to launch the forward pass of an fp8 layer."""
    layer = torch.nn.Linear(256, 256, device="cuda")
    x = torch.randn(256, 256, device="cuda")
    recipe = fastamp.Float8Recipe(min_gain=0)
    with fastamp.autocast("cuda", dtype=torch.bfloat16, float8=recipe):
        for _ in range(HOST_CALLS):
            layer(x)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            layer(x)
        seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / HOST_CALLS


def measure() -> list[Sample]:
    """Measures on the current GPU. Of the products in fp8 those of y sum with fewer bits."""
    samples = []
    for index, (rows, depth, columns) in enumerate(shapes()):
        a = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16).t()
        shape = (rows, depth, columns)
        samples.append(Sample("carrier", shape, _timed(lambda a=a, b=b: a @ b)))  # type: ignore[misc]
        product = _float8_product(rows, depth, columns, fast=index % 3 == 0)
        samples.append(Sample("float8", shape, _timed(product)))
    for count in CAST_ELEMENTS:
        for source, to in CASTS:
            x = torch.randn(count >> 10, 1024, device="cuda").to(source)
            seconds = _timed(lambda x=x, to=to: _C.cast_matrix(x, to))  # type: ignore[misc]
            samples.append(Sample("cast", cast_sizes(count, source, to), seconds))
    samples.append(Sample("host", (), _host_seconds()))
    return samples


def entry_of(gpu: dict[str, Any], comment: str) -> str:
    """Returns the entry of float8_constants.h for a GPU."""
    lines = [f"    // {line}" for line in _wrapped(comment, LINE_LENGTH - 7)]
    values = {
        "name": json.dumps(gpu["name"]),
        "driver_name": json.dumps(gpu["driver_name"]),
        "capability": str(gpu["capability"]),
        "multiprocessors": str(gpu["multiprocessors"]),
        **{name: f"{gpu[name]:.4g}" for name in FITTED},
    }
    fields = [f".{name} = {value}" for name, value in values.items()]
    lines.append(f"    Float8Gpu{{{fields[0]},")
    lines += [f"              {field}," for field in fields[1:-1]]
    lines.append(f"              {fields[-1]}}},")
    return "\n".join(lines) + "\n"


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


ENTRY = re.compile(r"(?:    //[^\n]*\n)+    Float8Gpu\{\.name = \"([^\"]*)\",.*?\},\n", re.DOTALL)


def rewritten(text: str, gpu: dict[str, Any], comment: str) -> str:
    """Returns the text of float8_constants.h with the entry of a GPU replaced, or added last.

    Raises:
        ValueError: The text has no entries.
    """
    entries = list(ENTRY.finditer(text))
    if not entries:
        raise ValueError("rewritten: expected entries of GPUs, got none")
    new = entry_of(gpu, comment)
    for entry in entries:
        if entry[1] == gpu["name"]:
            return text[: entry.start()] + new + text[entry.end() :]
    return text[: entries[-1].end()] + new + text[entries[-1].end() :]


def _this_gpu() -> dict[str, Any]:
    found = torch.cuda.get_device_properties()
    for known in _C.float8_constants():
        if known["driver_name"] == found.name:
            return dict(known)
    name = found.name.removeprefix("NVIDIA ")
    capability = 10 * found.major + found.minor
    return {
        "name": name,
        "driver_name": found.name,
        "capability": capability,
        "multiprocessors": found.multi_processor_count,
    }


def _errors(samples: Sequence[Sample], gpu: dict[str, Any]) -> str:
    """How far the fitted model is from the samples, kind by kind."""
    parts = []
    for kind in ("carrier", "float8", "cast"):
        ratios = [
            abs(model_seconds(gpu, kind, sample.sizes) / sample.seconds - 1)
            for sample in samples
            if sample.kind == kind
        ]
        parts.append(f"{kind} {statistics.median(ratios):.1%} (worst {max(ratios):.1%})")
    return "median error of the model: " + ", ".join(parts)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fit_float8_rule",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--samples", type=Path, help="fit this file of samples, measure nothing")
    parser.add_argument("--out", type=Path, default=SAMPLES, help="where the samples go")
    parser.add_argument(
        "--constants", type=Path, default=CONSTANTS, help="where the table with the new entry goes"
    )
    parser.add_argument("--dry-run", action="store_true", help="synthetic samples; writes nothing")
    parser.add_argument(
        "--gpu", default="H200 SXM", choices=_C.float8_gpus(), help="whose samples --dry-run makes"
    )
    options = parser.parse_args(arguments)
    if options.dry_run and options.samples:
        parser.error("argument --samples: expected none with --dry-run, got one")
    return options


def _load(path: Path) -> tuple[dict[str, Any], list[Sample], str]:
    found = json.loads(path.read_text(encoding="utf-8"))
    samples = [Sample(s["kind"], tuple(s["sizes"]), s["seconds"]) for s in found["samples"]]
    return found["gpu"], samples, found["environment"]["date"]


def _measured(out: Path) -> tuple[dict[str, Any], list[Sample], str]:
    gpu, environment, samples = _this_gpu(), describe(), measure()
    raw = {
        "gpu": gpu,
        "environment": environment,
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    return gpu, samples, environment["date"]


def main(arguments: Sequence[str]) -> int:
    """Does what was asked for."""
    options = parse(arguments)
    if options.dry_run:
        gpu = next(gpu for gpu in _C.float8_constants() if gpu["name"] == options.gpu)
        samples, date = synthetic(gpu, noise=0.03), "synthetic samples"
    elif options.samples:
        gpu, samples, date = _load(options.samples)
    elif not torch.cuda.is_available():
        print("expected a GPU, --samples or --dry-run, got none of them", file=sys.stderr)
        return 2
    else:
        gpu, samples, date = _measured(options.out)
    gpu = {**gpu, **fit(samples, gpu["multiprocessors"])}
    comment = (
        f"Fitted to {len(samples)} samples of benchmarks/fit_float8_rule.py ({date[:17]}); "
        f"{_errors(samples, gpu)}."
    )
    print(entry_of(gpu, comment), end="")
    if not options.dry_run:
        table = options.constants if options.constants.is_file() else CONSTANTS
        text = table.read_text(encoding="utf-8")
        options.constants.write_text(rewritten(text, gpu, comment), encoding="utf-8")
        print(f"written to {options.constants}: build again, and keep the samples with it")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
