# SPDX-License-Identifier: Apache-2.0
"""The fused steps over param groups written as torch.optim has them, and their comparison."""

from __future__ import annotations

import torch

from support.amp_reference import assert_same_bits

sgd_ = torch.ops.fastamp.fused_sgd_

# torch's own CPU kernels have fused multiply-adds where AVX2 is there, and none elsewhere.
TORCH_FUSES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def assert_same_step(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit where torch fuses what we fuse; else each of ~5 roundings may differ.

    Cancellation may make the difference large relative to one element, so it is compared with the
    largest one.
    """
    if TORCH_FUSES:
        assert_same_bits(got, expected)
    else:
        scale = expected.abs().max().item() if expected.numel() else 0.0
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6 * scale, equal_nan=True)


def is_16_bit(t: torch.Tensor) -> bool:
    return t.dtype in (torch.float16, torch.bfloat16)


class FusedSgd:
    """What an optimizer class would keep: buffers, counters and masters by parameter."""

    def __init__(self, groups, state_dtype=torch.float32):
        self.groups = groups
        self.buffers = {}
        self.steps = {}
        self.masters = {}
        for group in groups:
            for p in group["params"]:
                # Not zeros: what was never written must never be read.
                garbage = torch.full_like(p, float("nan"), dtype=state_dtype)
                self.buffers[p] = garbage.requires_grad_(False)
                self.steps[p] = torch.zeros((), device=p.device)
                if is_16_bit(p):
                    self.masters[p] = p.detach().float()

    def arguments(self, lr_tensors=(), weight_copies=(), copy_of=()):
        params = [p for g in self.groups for p in g["params"]]
        moving = [p for g in self.groups if g.get("momentum", 0) for p in g["params"]]
        return (
            params,
            [p.grad for p in params],
            [self.buffers[p] for p in moving],
            [self.steps[p] for p in moving],
            [self.masters[p] for p in params if is_16_bit(p)],
            [len(g["params"]) for g in self.groups],
            [g["lr"] for g in self.groups],
            [g.get("momentum", 0.0) for g in self.groups],
            [g.get("dampening", 0.0) for g in self.groups],
            [g.get("weight_decay", 0.0) for g in self.groups],
            [g.get("nesterov", False) for g in self.groups],
            [g.get("maximize", False) for g in self.groups],
            list(lr_tensors),
            list(weight_copies),
            list(copy_of),
        )

    def step(self, lr_tensors=(), weight_copies=(), copy_of=(), **amp_step):
        sgd_(*self.arguments(lr_tensors, weight_copies, copy_of), **amp_step)


def adamw_(*arguments, moment_scales=(), **amp_step):
    """The op; few calls have moments in 8 bits."""
    return torch.ops.fastamp.fused_adamw_(*arguments, moment_scales=list(moment_scales), **amp_step)


class FusedAdam:
    """The same for Adam and AdamW."""

    def __init__(self, groups, state_dtype=torch.float32):
        self.groups = groups
        self.moments = {}
        self.steps = {}
        self.masters = {}
        for group in groups:
            for p in group["params"]:
                self.moments[p] = [torch.zeros_like(p, dtype=state_dtype) for _ in range(3)]
                self.steps[p] = torch.zeros((), device=p.device)
                if is_16_bit(p):
                    self.masters[p] = p.detach().float()

    def arguments(self, lr_tensors=(), weight_copies=(), copy_of=()):
        params = [p for g in self.groups for p in g["params"]]
        widest = [p for g in self.groups if g.get("amsgrad") for p in g["params"]]
        betas = [g.get("betas", (0.9, 0.999)) for g in self.groups]
        return (
            params,
            [p.grad for p in params],
            [self.moments[p][0] for p in params],
            [self.moments[p][1] for p in params],
            [self.moments[p][2] for p in widest],
            [self.steps[p] for p in params],
            [self.masters[p] for p in params if is_16_bit(p)],
            [len(g["params"]) for g in self.groups],
            [g["lr"] for g in self.groups],
            [b[0] for b in betas],
            [b[1] for b in betas],
            [g.get("eps", 1e-8) for g in self.groups],
            [g.get("weight_decay", 0.0) for g in self.groups],
            [g.get("decoupled_weight_decay", True) for g in self.groups],
            [g.get("amsgrad", False) for g in self.groups],
            [g.get("maximize", False) for g in self.groups],
            list(lr_tensors),
            list(weight_copies),
            list(copy_of),
        )

    def step(self, lr_tensors=(), weight_copies=(), copy_of=(), **amp_step):
        adamw_(*self.arguments(lr_tensors, weight_copies, copy_of), **amp_step)
