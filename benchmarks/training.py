# SPDX-License-Identifier: Apache-2.0
"""One way of training a model: in fp32, with torch.amp, or with fastamp, from the same seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn

import fastamp
from benchmarks.counts import MEBI, profiled, saved_for_backward
from benchmarks.harness import BASELINE, FASTAMP, Candidate
from benchmarks.models import Workload, logits, loss_of
from benchmarks.sides import REGIONS, SCALERS, own_optimizers, use_kernels_of

FP32, TF32 = "fp32", "fp32, TF32"
TEST_BATCHES = 4
# After two steps nothing happens for the first time: the optimizer requests weight copies in the
# first one, and the casts of the second one's region become them.
WARM_UP = 2


def torch_optimizer(name: str, parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Returns torch's own optimizer, its fastest: fused."""
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=True)
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def own_optimizer(
    name: str, parameters: Any, lr: float, autocast_dtype: torch.dtype | None
) -> torch.optim.Optimizer:
    """Returns fastamp's optimizer with the same hyperparameters."""
    kinds = own_optimizers()
    found: torch.optim.Optimizer
    if name == "SGD":
        found = kinds.SGD(parameters, lr=lr, momentum=0.9, autocast_dtype=autocast_dtype)
    else:
        found = kinds.AdamW(parameters, lr=lr, autocast_dtype=autocast_dtype)
    return found


@dataclass
class Training:
    """A model in training.

    Attributes:
        workload: What is trained.
        which: ``torch.amp``, ``fastamp``, ``fp32`` or ``fp32, TF32``.
        device: ``cpu`` or ``cuda``.
        dtype: The region's.
        weight_copies: Whether fastamp's optimizer writes the casts of weights.
        float8: Whether fastamp's region runs linear layers in fp8.
    """

    workload: Workload
    which: str
    device: str
    dtype: torch.dtype
    weight_copies: bool = False
    float8: bool = False
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        """Makes the model from seed 0, its optimizer, scaler, region and first batch."""
        work, mixed = self.workload, self.which in (BASELINE, FASTAMP)
        torch.manual_seed(0)
        with torch.device(self.device):  # A GPU draws 1e8 numbers sooner than the CPU does.
            self.model = work.model().train()
        arguments = work.optimizer, self.model.parameters(), work.lr
        if self.which == FASTAMP:
            region_dtype = torch.float8_e4m3fn if self.float8 else self.dtype
            autocast_dtype = region_dtype if self.weight_copies else None
            self.optimizer = own_optimizer(*arguments, autocast_dtype)
        else:
            self.optimizer = torch_optimizer(*arguments)
        name = self.which if mixed else BASELINE
        # bf16 has fp32's range: scaling would do nothing for it.
        scaled = mixed and self.dtype == torch.float16
        self.scaler = SCALERS[name](self.device, enabled=scaled)
        recipe = {"float8": True} if self.float8 else {}
        self.region = REGIONS[name](self.device, dtype=self.dtype, enabled=mixed, **recipe)
        self.batches = work.batches(work.batch, self.device, False)
        self.x, self.y = next(self.batches)

    def forward(self) -> torch.Tensor:
        """Returns the loss of the batch."""
        with self.region:
            return loss_of(logits(self.model, self.x), self.y)

    def step(self) -> torch.Tensor:
        """Trains on the batch that was last drawn, and returns its loss."""
        self.optimizer.zero_grad()
        loss = self.forward()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def gradients(self) -> None:
        """Goes forward and backward, and steps not."""
        self.optimizer.zero_grad()
        self.forward().backward()  # type: ignore[no-untyped-call]

    def before(self) -> None:
        """Puts this way's kernels and precision in place."""
        use_kernels_of(FASTAMP if self.which == FASTAMP else BASELINE)()
        if self.device == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = self.which == TF32
            torch.backends.cudnn.allow_tf32 = self.which == TF32

    def after(self) -> None:
        """Puts back what was there."""
        fastamp._C.register_kernels()
        if self.device == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = True

    def warm_up(self) -> None:
        """Takes the steps in which caches fill."""
        self.before()
        try:
            for _ in range(WARM_UP):
                self.step()
        finally:
            self.after()

    def candidate(self) -> Candidate:
        """Returns a step on one batch as a candidate of a row."""
        return Candidate("step()", {"step": self.step}, self.before, self.after)

    @torch.no_grad()
    def accuracy(self) -> float:
        """Returns the share of test images, or of test tokens, that are predicted, in percent."""
        self.model.eval()
        right = total = 0
        for x, y in islice(
            self.workload.batches(self.workload.batch, self.device, True), TEST_BATCHES
        ):
            with self.region:
                guess = logits(self.model, x).argmax(-1)
            right += int((guess == y).sum())
            total += int((y >= 0).sum())
        self.model.train()
        return 100 * right / total

    def facts(self, steps: int) -> dict[str, float]:
        """Counts one step, then trains for so many more and looks at loss and accuracy."""
        found = self.counts()
        self.before()
        try:
            found["MiB saved for backward"] = self._saved()
            losses = []
            for batch in islice(self.batches, steps):
                self.x, self.y = batch
                losses.append(self.step().detach())
            last = torch.stack(losses[-min(10, len(losses)) :]).float()
            found["steps"] = float(steps)
            found["loss"] = last.mean().item()
            found["accuracy %"] = self.accuracy()
        finally:
            self.after()
        return found

    def counts(self) -> dict[str, float]:
        """Counts one step of those that come after the first ones."""
        self.warm_up()
        self.before()
        try:
            found = profiled(self.step, self.device, self.model.parameters())
            if self.device == "cuda":
                self.optimizer.zero_grad()
                torch.cuda.reset_peak_memory_stats()
                self.step()
                found["MiB peak"] = torch.cuda.max_memory_allocated() / MEBI
        finally:
            self.after()
        return found

    def _saved(self) -> float:
        self.optimizer.zero_grad()
        return saved_for_backward(self.forward, self.model)


def ways(device: str) -> tuple[str, ...]:
    """Returns the ways to train that are compared on a device; TF32 is a GPU's."""
    return (BASELINE, FASTAMP, FP32, TF32) if device == "cuda" else (BASELINE, FASTAMP, FP32)


def largest_batch(workload: Workload, which: str, dtype: torch.dtype, limit_bytes: int) -> int:
    """Returns the largest batch, in steps of an eighth, whose training step fits into so much.

    GPU only. The limit stands for a smaller GPU, and keeps the search short on a large one.
    """
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))

    def fits(batch: int) -> bool:
        try:
            training = Training(workload.of_batch(batch), which, "cuda", dtype)
            training.before()
            for _ in range(2):
                training.step()
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return False
        finally:
            training = None
            fastamp._C.register_kernels()
            torch.cuda.empty_cache()
        return True

    try:
        return search(fits)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def search(fits: Any) -> int:
    """Returns the largest batch that fits, to an eighth of itself; 0 if not even one does."""
    good, bad = 0, 1
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
