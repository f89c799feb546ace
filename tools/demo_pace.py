# SPDX-License-Identifier: Apache-2.0
"""Measures how long an iteration of the demo's training takes here: the demo goes by it.

demo_pace.py DATA prints {"fp32": 1.2, ...}, milliseconds. Plain torch.amp, a few
iterations each: what the demo shows is not known beforehand. fp8, which torch.amp has not, is
fastamp's.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP, TIMED, LONGEST = 3, 20, 0.5  # iterations, iterations, seconds that no other is begun after


def float8_region(device: str) -> Any:
    """Returns fastamp's fp8 region, without the warning, which the demo gives."""
    import fastamp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return fastamp.autocast(device, float8=True)


def milliseconds(data: dict[str, Any], device: str, region_of: Callable[[str], Any]) -> float:
    """Returns the time of one iteration."""
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    region = region_of(device)
    ends = [time.perf_counter()]
    while len(ends) <= WARM_UP + TIMED and ends[-1] - ends[0] < LONGEST:
        optimizer.zero_grad()
        with region:
            loss = torch.nn.functional.cross_entropy(model(data["x"]), data["y"])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()  # waits for the device
        ends.append(time.perf_counter())
    return 1e3 * typical([after - before for before, after in pairwise(ends)])


def typical(times: Sequence[float]) -> float:
    """Returns the median of times, without those of the warm-up if there are others."""
    return statistics.median(times[WARM_UP:] or times[-1:])


def main() -> None:
    """Prints the times."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = torch.load(sys.argv[1], map_location=device)
    regions: dict[str, Callable[[str], Any]] = {
        name: partial(torch.autocast, dtype=dtype, enabled=dtype != torch.float32)
        for name, dtype in DTYPES.items()
    }
    regions["fp8"] = float8_region  # last: it puts fastamp's kernels in the place of torch's
    times = {name: milliseconds(data, device, region) for name, region in regions.items()}
    print(json.dumps(times))


if __name__ == "__main__":
    main()
