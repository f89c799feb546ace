# SPDX-License-Identifier: Apache-2.0
"""Requests of two precisions in one event loop: regions are left at each await.

python examples/python/async_serving.py
"""

from __future__ import annotations

import asyncio
from collections import Counter

import torch
from torch import nn

import fastamp

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).to(device)
model.eval().requires_grad_(False)
ran: Counter[torch.dtype] = Counter()


async def answer(count: int) -> None:
    """Answers a request."""
    for _ in range(count):
        await asyncio.sleep(0)  # the next token, a database, another task
        ran[model(torch.randn(1, 64, device=device)).dtype] += 1


# `with fastamp.autocast(...)` around an await would be the other tasks' region, too, and is warned
# of. A decorated coroutine enters it for each of its steps, and leaves it while it waits.
fast = fastamp.autocast(device, dtype=torch.bfloat16)(answer)
exact = answer


async def serve() -> None:
    """Answers all of them at once."""
    await asyncio.gather(*(fast(20) for _ in range(3)), *(exact(10) for _ in range(2)))


asyncio.run(serve())
print(", ".join(f"{n} in {str(d).removeprefix('torch.')}" for d, n in sorted(ran.items(), key=str)))
