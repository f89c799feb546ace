"""Whole training steps of the digits example: all of torch.amp beside all of fastamp."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.harness import Candidate, Row
from benchmarks.rows.common import REGIONS, SCALERS, use_kernels_of, waiting_for

MODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _candidate(which: str, device: str, dtype: torch.dtype, batch: int) -> Candidate:
    torch.manual_seed(0)
    x = torch.randn(batch, 64, device=device)
    y = torch.randint(10, (batch,), device=device)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = SCALERS[which](device, enabled=dtype == torch.float16)
    region = REGIONS[which](device, dtype=dtype, enabled=dtype != torch.float32)

    def step() -> None:
        optimizer.zero_grad()
        with region:
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Candidate("step()", {"step": step}, use_kernels_of(which), use_kernels_of("fastamp"))


def _row(device: str, mode: str, batch: int) -> Row:
    def candidates() -> dict[str, Candidate]:
        return {which: _candidate(which, device, MODES[mode], batch) for which in REGIONS}

    name = f"{device}: digits step, {mode}, batch {batch}"
    return Row(name, candidates, wait=waiting_for(device))


def rows(device: str) -> list[Row]:
    """Returns the rows of one device: the example's batch, and one where overhead shows."""
    return [_row(device, mode, batch) for batch in (32, 1797) for mode in MODES]
