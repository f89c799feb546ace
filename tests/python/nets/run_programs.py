# SPDX-License-Identifier: Apache-2.0
"""Runs generated programs for a long time: PYTHONPATH=tests/python python -m nets.run_programs."""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch

from nets.program_maker import make
from nets.program_runs import failures

PART = 1000


def main() -> int:
    """Returns 0 if no program differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--count", type=int, default=100_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    for first in range(options.first, options.first + options.count, PART):
        last = min(first + PART, options.first + options.count)
        ends, texts = failures(make(seed) for seed in range(first, last))
        total += ends
        print("\n\n".join(texts), end="\n" if texts else "")
        print(f"seeds to {last - 1}: {dict(total)}, {time.process_time():.0f} s of CPU", flush=True)
    return int(total["differ"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
