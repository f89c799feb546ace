# SPDX-License-Identifier: Apache-2.0
"""Calls with two dtypes that torch refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

BF16, FP32 = torch.bfloat16, torch.float32


def randn(*sizes: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


ROWS = torch.tensor([0, 2])

# A call that torch refuses, and the dtype to which its arguments have to be cast by hand.
Calls = dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], torch.dtype]]
INDEX = ROWS[:, None].expand(2, 4)
FUNCTIONS: Calls = {
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), BF16),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), BF16),
    "linalg.cross": (lambda a, b: torch.linalg.cross(a[:, :3], b[:, :3]), FP32),
    "embedding_bag": (
        lambda a, b: functional.embedding_bag(
            ROWS[None], a, per_sample_weights=b[:1, :2], mode="sum"
        ),
        BF16,
    ),
    "dot": (lambda a, b: torch.dot(a[0], b[0]), FP32),
    "isclose": (torch.isclose, FP32),
    "index_put": (lambda a, b: a.index_put((ROWS,), b[:2]), FP32),
    "masked_scatter": (lambda a, b: a.masked_scatter(a > 0, b), BF16),
    "scatter": (lambda a, b: a.scatter(0, INDEX, b[:2]), BF16),
    "scatter_add": (lambda a, b: a.scatter_add(0, INDEX, b[:2]), FP32),
    "scatter_reduce": (lambda a, b: a.scatter_reduce(0, INDEX, b[:2], "amax"), BF16),
    "index_add": (lambda a, b: a.index_add(0, ROWS, b[:2]), BF16),
    "layer_norm": (lambda a, b: functional.layer_norm(a, (4,), b[0], a.detach()[1]), FP32),
}


Writes = dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]
WRITES: Writes = {
    "masked": lambda x, v: x.__setitem__(torch.tensor([True, False, True, False]), v),
    "indexed": lambda x, v: x.__setitem__(ROWS, v),
    "index_put_": lambda x, v: x.index_put_((ROWS,), v, accumulate=True),
    "scatter_": lambda x, v: x.scatter_(0, ROWS[:, None].expand(2, 4), v),
    "scatter_add_": lambda x, v: x.scatter_add_(0, ROWS[:, None].expand(2, 4), v),
    "scatter_reduce_": lambda x, v: x.scatter_reduce_(
        0, ROWS[:, None].expand(2, 4), v, "sum", include_self=False
    ),
    "index_add_": lambda x, v: x.index_add_(0, ROWS, v),
    "index_copy_": lambda x, v: x.index_copy_(0, ROWS, v),
    "lerp_": lambda x, v: x[:2].lerp_(v, 0.5),
    "masked_scatter_": lambda x, v: x.masked_scatter_(x > 0, v.repeat(4, 1)),
    "put_": lambda x, v: x.put_(torch.arange(8), v.reshape(-1)),
    "addmm_": lambda x, v: x.addmm_(v.t(), v),
    "addmv_": lambda x, v: x[0].addmv_(x.clone(), v[0]),  # Else it would write what it reads.
    "mm with out": lambda x, v: torch.mm(v.t(), v, out=x),
    "lerp with out": lambda x, v: torch.lerp(x[2:], v, 0.5, out=x[:2]),
}
