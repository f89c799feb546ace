# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Accelerate, with fastamp installed behind its back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fastamp
from support.twin_runs import (
    assert_same,
    installed_fastamp,
    is_fastamps,
    parameters_of,
    plain_torch,
    same_results,
)

SCALE = {"init_scale": 2.0**14, "growth_interval": 2}


def reset() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def accelerate() -> Iterator[Any]:
    library = pytest.importorskip("accelerate", reason="the thirdparty extra is not installed")
    yield library
    reset()


class Job:
    """A classifier prepared by Accelerate."""

    def __init__(self, device: str, precision: str, accumulate: int = 1) -> None:
        from accelerate import Accelerator
        from accelerate.utils import GradScalerKwargs

        reset()
        self.accelerator = Accelerator(
            cpu=device == "cpu",
            mixed_precision=precision,
            gradient_accumulation_steps=accumulate,
            kwargs_handlers=[GradScalerKwargs(**SCALE)],
        )
        if device == "cpu" and precision == "fp16":
            # Accelerate has scalers for accelerators only; from here on the path is the same.
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", **SCALE)
        if self.accelerator.scaler is not None:
            assert is_fastamps(self.accelerator.scaler)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.arange(32) % 4), batch_size=4)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )

    def train(self, overflow_at: int = -1) -> list[tuple[Any, ...]]:
        accelerator, trace = self.accelerator, []
        for step, (x, y) in enumerate(self.loader):
            with accelerator.accumulate(self.model):
                output = self.model(x)
                loss = cross_entropy(output, y)
                accelerator.backward(loss * (float("inf") if step == overflow_at else 1.0))
                norm = None
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), 0.5).item()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            state = accelerator.scaler.state_dict() if accelerator.scaler else None
            skipped = accelerator.optimizer_step_was_skipped
            trace.append((loss.item(), norm, skipped, self.scheduler.get_last_lr(), state))
        return trace


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_gives_torchs_bits(device: str, precision: str, accumulate: int):
    def run() -> Any:
        job = Job(device, precision, accumulate)
        return job.train(overflow_at=3), parameters_of(job.model)

    trace, _ = same_results(run)
    skipped = [step for step, values in enumerate(trace) if values[2]]
    if precision == "bf16":  # no scaler: the infinity reaches the weights, as with torch.amp
        assert skipped == []
    else:
        assert skipped == [3] * (accumulate == 1) or skipped[0] == 3
        assert trace[3][4]["scale"] == trace[1][4]["scale"] / 2


def test_regions_that_the_user_opens(device: str):
    def run() -> Any:
        job = Job(device, "bf16")
        raw = nn.Linear(8, 8).to(job.accelerator.device)
        x = torch.randn(2, 8, device=job.accelerator.device)
        with job.accelerator.autocast():
            inside = raw(x)
        return inside.detach().cpu(), raw(x).detach().cpu()

    inside, outside = same_results(run)
    assert (inside.dtype, outside.dtype) == (torch.bfloat16, torch.float32)


def test_a_checkpoint_saved_under_torch_is_resumed_under_fastamp(device: str, tmp_path: Path):
    with plain_torch():
        job = Job(device, "fp16")
        job.train(overflow_at=3)
        job.accelerator.save_state(str(tmp_path / "saved"))
        expected = job.train(), parameters_of(job.model)
    with installed_fastamp():
        job = Job(device, "fp16")
        job.accelerator.load_state(str(tmp_path / "saved"))
        assert isinstance(job.accelerator.scaler, fastamp.GradScaler)
        resumed = job.train(), parameters_of(job.model)
    assert_same(resumed, expected)
