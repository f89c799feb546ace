# SPDX-License-Identifier: Apache-2.0
"""Two optimizers over the same parameters, fastamp's and torch's, and how they are compared."""

from __future__ import annotations

import torch

import fastamp.optim
from support.amp_reference import assert_same_bits
from support.fused_steps import TORCH_FUSES, assert_same_step

PAIRS = {
    "SGD": (fastamp.optim.SGD, torch.optim.SGD),
    "Adam": (fastamp.optim.Adam, torch.optim.Adam),
    "AdamW": (fastamp.optim.AdamW, torch.optim.AdamW),
}
SIZES = ((), (1,), (3, 5), (0, 4), (17,), (2, 3, 4), (1030,))


def parameters(shapes=SIZES, dtype=torch.float32, device="cpu"):
    return [
        torch.nn.Parameter(torch.randn(shape, device=device).to(dtype=dtype)) for shape in shapes
    ]


def copies(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


class Twins:
    """An optimizer of fastamp and of torch of the same name, over equal parameters."""

    def __init__(self, name, groups, **options):
        """``groups``: dicts with "params"; ``options``: arguments of both optimizers."""
        own, torchs = PAIRS[name]
        others = [{**group, "params": copies(group["params"])} for group in groups]
        self.name = name
        self.mine = [p for group in groups for p in group["params"]]
        self.others = [p for group in others for p in group["params"]]
        self.own = own([dict(group) for group in groups], **options)
        self.torchs = torchs(others, **options)

    def set_gradients(self, draw=torch.randn_like, absent=()):
        for i, (p, q) in enumerate(zip(self.mine, self.others, strict=True)):
            p.grad = None if i in absent else draw(p)
            q.grad = None if i in absent else p.grad.clone()

    def step(self, **arguments):
        """Steps both; each step of Adam is judged on its own."""
        before = [q.detach().clone() for q in self.others]
        results = self.own.step(**arguments), self.torchs.step(**arguments)
        for p, q, was in zip(self.mine, self.others, before, strict=True):
            if self.name == "SGD":
                assert_same_step(p.detach(), q.detach())
            else:
                self._check_adam(p, q, was)
            self._check_state(p, q)
        return results

    def _check_adam(self, p, q, was):
        # torch takes square roots by MKL, off by a unit in the last place (2^-23) at times; see
        # tests/python/ops/test_fused_adamw.py for the bound.
        bound = 2.0**-21 * (q.detach().abs() + was.abs()) + 2.0**-23 * q.detach().abs()
        bound *= 1 if TORCH_FUSES else 8
        assert ((p.detach() - q.detach()).abs() <= bound).all()
        with torch.no_grad():
            q.copy_(p)

    def _check_state(self, p, q):
        mine, other = self.own.state.get(p, {}), self.torchs.state.get(q, {})
        for key, value in other.items():
            if not isinstance(value, torch.Tensor):
                continue
            if key == "step":
                assert mine[key].dtype == torch.float32
                assert mine[key].item() == value.item()
            else:
                assert_same_step(mine[key].detach(), value.detach())
        assert set(mine) - {"momentum_steps"} == {k for k, v in other.items() if v is not None}


def assert_same_parameters(first, second):
    for p, q in zip(first, second, strict=True):
        assert_same_bits(p.detach(), q.detach())
