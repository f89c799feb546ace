# SPDX-License-Identifier: Apache-2.0
"""Measures how long an iteration of the demo's training takes here, for its announcement.

demo_pace.py DATA prints {"device": "cpu", "ms": {"fp32": 1.2, ...}}. Plain torch.amp, a few
iterations each: what the demo shows is not told beforehand. fp8, which torch.amp has not, is
fastamp's.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP, TIMED, LONGEST = 3, 20, 0.5  # iterations, iterations, seconds


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
    done, start = -WARM_UP, time.perf_counter()
    while done < TIMED and time.perf_counter() - start < LONGEST:
        optimizer.zero_grad()
        with region:
            loss = torch.nn.functional.cross_entropy(model(data["x"]), data["y"])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        done += 1
        if done == 0:
            loss.item()  # waits for the device
            start = time.perf_counter()
    loss.item()
    return 1e3 * (time.perf_counter() - start) / max(done, 1)


def main() -> None:
    """Prints the device and the times."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = torch.load(sys.argv[1], map_location=device)
    regions: dict[str, Callable[[str], Any]] = {
        name: partial(torch.autocast, dtype=dtype, enabled=dtype != torch.float32)
        for name, dtype in DTYPES.items()
    }
    regions["fp8"] = float8_region  # last: it puts fastamp's kernels in the place of torch's
    times = {name: milliseconds(data, device, region) for name, region in regions.items()}
    print(json.dumps({"device": device, "ms": times}))


if __name__ == "__main__":
    main()
