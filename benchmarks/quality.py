# SPDX-License-Identifier: Apache-2.0
"""What a model learns by how its weights and optimizer states are stored.

    python -m benchmarks.quality            trains, for a quarter of an hour, and writes the table
    python -m benchmarks.quality --report   writes the table of docs/optim.md from the newest result

A small GPT on the text of Python's language reference, with each layout from the same weights and
batches: the loss on the last tenth of the text, on which no step was taken, for several seeds. A
layout is as good as float32 states if its losses differ from theirs by less than seeds differ.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import fastamp
from benchmarks.data import text_batches
from benchmarks.environment import ROOT, describe
from benchmarks.harness import BASELINE
from benchmarks.models import gpt2, logits, loss_of
from benchmarks.rows.low_precision_weights import DTYPE, LAYOUTS, stored_in
from benchmarks.sides import REGIONS, use_kernels_of

RESULTS = ROOT / "benchmarks" / "results" / "quality"
PAGE = ROOT / "docs" / "optim.md"
BEGIN, END = "<!-- quality: begin -->", "<!-- quality: end -->"
STEPS, WARM_UP, SEEDS = 600, 50, (0, 1, 2)
LENGTH, BATCH, TEST_BATCHES = 64, 8, 40
# The default second beta: the one that states in few bits find hardest.
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 256, "n_positions": LENGTH}
    return gpt2(**sizes, bos_token_id=0, eos_token_id=0)


def rate(step: int) -> float:
    """Returns the factor of the learning rate at a step from 1 on: warm-up, then a cosine."""
    return min(1.0, step / WARM_UP) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS)))


def losses_of(name: str, seed: int, device: str, steps: int = STEPS) -> list[float]:
    """Trains; returns the losses of the test batches.

    Args:
        name: ``torch.amp`` or one of the layouts.
        seed: Of weights and batches.
        device: ``cpu`` or ``cuda``.
        steps: How many.
    """
    model = _model(seed).to(device)
    batches = text_batches(LENGTH, BATCH, device, seed=1000 + seed)
    if name == BASELINE:
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    else:
        example = next(text_batches(LENGTH, BATCH, device))[0]
        optimizer = stored_in(LAYOUTS[name], model, example, **OPTIONS)
    region = REGIONS[BASELINE if name == BASELINE else "fastamp"](device, dtype=DTYPE)
    use_kernels_of(BASELINE if name == BASELINE else "fastamp")()
    try:
        for step, (x, y) in enumerate(islice(batches, steps), start=1):
            for group in optimizer.param_groups:
                group["lr"] = OPTIONS["lr"] * rate(step)
            optimizer.zero_grad()
            with region:
                loss = loss_of(logits(model, x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        tests = text_batches(LENGTH, BATCH, device, test=True, seed=7)
        with torch.no_grad(), region:
            return [loss_of(logits(model, x), y).item() for x, y in islice(tests, TEST_BATCHES)]
    finally:
        fastamp._C.register_kernels()


def measure(device: str, names: Sequence[str], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Returns each layout's mean test loss, seed by seed."""
    found: dict[str, list[float]] = {name: [] for name in names}
    runs = [(seed, name) for seed in seeds for name in names]
    for seed, name in tqdm(runs, unit="run"):
        found[name].append(statistics.fmean(losses_of(name, seed, device)))
    return found


def table_of(result: dict[str, Any]) -> str:
    """Returns the table, for Markdown; losses beside those of torch.amp's fused AdamW."""
    losses: dict[str, list[float]] = result["losses"]
    exact = losses[BASELINE]
    spread = max(exact) - min(exact)
    environment = result["environment"]
    seeds = len(exact)
    lines = [
        f"{environment['cpu'] if environment['gpu'] == 'none' else environment['gpu']}, torch "
        f"{environment['torch']}, {environment['date'][:10]}, revision {environment['revision']}. "
        f"Losses of {BASELINE} differ by {spread:.4f} from seed to seed.",
        "",
        f"| Layout | {' | '.join(f'seed {n}' for n in range(seeds))} | mean | from {BASELINE}'s, "
        "seed by seed |",
        f"|---|{'---|' * (seeds + 2)}",
    ]
    for name, values in losses.items():
        gaps = [f"{value - other:+.4f}" for value, other in zip(values, exact, strict=True)]
        numbers = " | ".join(f"{value:.4f}" for value in (*values, statistics.fmean(values)))
        lines.append(f"| {name} | {numbers} | {', '.join(gaps) if values != exact else 'equal'} |")
    return "\n".join(lines)


def write_table(result: dict[str, Any], page: Path = PAGE) -> None:
    """Puts the table between its marks.

    Raises:
        ValueError: The page has no marks.
    """
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"write_table: expected {BEGIN} and {END} in {page.name}, got neither")
    head, rest = text.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    page.write_text(f"{head}{BEGIN}\n\n{table_of(result)}\n\n{END}{tail}", encoding="utf-8")


def newest() -> dict[str, Any]:
    """Returns the newest stored result.

    Raises:
        FileNotFoundError: There is none.
    """
    results = sorted(RESULTS.glob("*.json"))
    if not results:
        raise FileNotFoundError("expected a result of python -m benchmarks.quality, found none")
    found: dict[str, Any] = json.loads(results[-1].read_text(encoding="utf-8"))
    return found


def main(arguments: Sequence[str]) -> int:
    """Does what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--report", action="store_true", help="only write the table")
    options = parser.parse_args(arguments)
    if not options.report:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        environment = describe()
        losses = measure(device, [BASELINE, *LAYOUTS], SEEDS)
        RESULTS.mkdir(parents=True, exist_ok=True)
        name = f"{environment['date'][:10]}-{environment['revision']}-{device}.json"
        raw = {"environment": environment, "losses": losses}
        (RESULTS / name).write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    write_table(newest())
    print(table_of(newest()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
