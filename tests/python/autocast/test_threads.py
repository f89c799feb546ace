# SPDX-License-Identifier: Apache-2.0
"""Many threads run ops in regions at once, on shared and on own weights."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

import fastamp

BF16, FP16 = torch.bfloat16, torch.float16
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_threads_get_right_products_of_shared_and_own_weights():
    shared = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(4)]
    region = fastamp.autocast("cpu", dtype=FP16)

    def work(seed: int) -> int:
        own = [torch.nn.Parameter(torch.full((8, 8), float(seed + i))) for i in range(4)]
        wrong = 0
        for step in range(40):
            regions = [region, torch.autocast("cpu", dtype=BF16), fastamp.autocast("cpu")]
            with regions[step % 3] as entered:
                dtype = entered.fast_dtype
                for w in shared + own:
                    expected = torch.mm(X.to(dtype), w.detach().to(dtype))
                    wrong += not torch.equal(torch.mm(X, w), expected)
            with torch.no_grad():
                torch._foreach_mul_(own, 1.01)
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) == 0


def test_threads_accumulate_the_gradients_of_a_shared_weight():
    w = torch.nn.Parameter(torch.eye(8))
    lock = threading.Lock()

    def work(_: int) -> None:
        with fastamp.autocast("cpu", dtype=BF16):
            out = torch.mm(torch.ones(1, 8), w)
        with lock:
            out.float().sum().backward()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(32)))
    assert torch.equal(w.grad, torch.full((8, 8), 32.0))


def test_the_backward_of_one_region_runs_while_another_thread_is_in_its_own():
    def train(dtype: torch.dtype) -> bool:
        w = torch.nn.Parameter(torch.eye(8))
        for _ in range(30):
            with fastamp.autocast("cpu", dtype=dtype):
                torch.mm(torch.mm(X, w), w).float().sum().backward()
        return w.grad.dtype == torch.float32 and bool(w.grad.isfinite().all())

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(train, [BF16, FP16]))
