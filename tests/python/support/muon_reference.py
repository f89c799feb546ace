# SPDX-License-Identifier: Apache-2.0
"""torch.optim.Muon beside fastamp's over the same matrices, and how the two are compared."""

from __future__ import annotations

import torch

import fastamp.optim
from support.fused_steps import assert_same_step

# Square, wide, tall, equal ones, a row, a column, and one without elements.
SHAPES = ((3, 5), (16, 16), (5, 3), (3, 5), (33, 20), (16, 16), (1, 7), (7, 1), (0, 4))

# Where a library has other code for batches than for single matrices, products of 16 bits are
# summed in another order, and elements of the orthogonal matrix, of magnitude 1.2 at most, end some
# units of bfloat16 apart. On processors where that was seen, by 1/128.
BATCH_BOUND = 0.05


def matrices(shapes=SHAPES, dtype=torch.float32):
    """Parameters, one of them lying column by column."""
    made = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    return [*made, torch.nn.Parameter(torch.randn(6, 4).t().to(dtype))]


class MuonTwins:
    """An optimizer of fastamp and of torch over equal matrices."""

    def __init__(self, groups, **options):
        """``groups``: dicts with "params"; ``options``: arguments of both."""
        others = [
            {**group, "params": [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]}
            for group in groups
        ]
        self.mine = [p for group in groups for p in group["params"]]
        self.others = [p for group in others for p in group["params"]]
        self.own = fastamp.optim.Muon([dict(group) for group in groups], **options)
        self.torchs = torch.optim.Muon(others, **options)

    def set_gradients(self, absent=()):
        for i, (p, q) in enumerate(zip(self.mine, self.others, strict=True)):
            p.grad = None if i in absent else torch.randn_like(p)
            q.grad = None if i in absent else p.grad.clone()

    def step(self):
        """Steps both, judges the step, and lets the next one begin at the same weights."""
        self.own.step()
        self.torchs.step()
        rates = {
            id(p): self._rate(group, p) for group in self.own.param_groups for p in group["params"]
        }
        for p, q in zip(self.mine, self.others, strict=True):
            assert_close(p, q, rates[id(p)])
            mine, other = self.own.state.get(p, {}), self.torchs.state.get(q, {})
            assert set(mine) == set(other)
            if other:
                assert_same_step(mine["momentum_buffer"], other["momentum_buffer"])
            with torch.no_grad():
                q.copy_(p)

    @staticmethod
    def _rate(group, p):
        rows, columns = max(p.shape[0], 1), max(p.shape[1], 1)
        if group["adjust_lr_fn"] == "match_rms_adamw":
            return float(group["lr"]) * 0.2 * max(rows, columns) ** 0.5
        return float(group["lr"]) * max(1, rows / columns) ** 0.5


def assert_close(p, q, rate):
    """Equal but for the sums of batched products."""
    if p.numel() > 0:
        worst = (p.detach().float() - q.detach().float()).abs().max().item()
        assert worst <= BATCH_BOUND * rate + 1e-6, (tuple(p.shape), worst)
