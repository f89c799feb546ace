# SPDX-License-Identifier: Apache-2.0
"""Models loaded in fp16 under Accelerate, Lightning and the Trainer, which unscale and clip.

The bound: after the eight steps here, masters are within 2 % of the largest update of float32
weights that torch.amp trains from the same values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fastamp.optim
from support.twin_runs import installed_fastamp

pytestmark = pytest.mark.filterwarnings("ignore")  # of many kinds
SCALE = {"init_scale": 2.0**14, "growth_interval": 4}
BOUND = 0.02
Made = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture(scope="module", autouse=True)
def _lightning() -> None:
    with contextlib.suppress(ImportError):  # Imported first: it wraps torch.compile for good.
        import lightning.pytorch  # noqa: F401


def make(half: bool, opted_in: bool) -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).half()
    model = model if half else model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if opted_in:
        fastamp.optim.fuse_(optimizer, widen_grads=True)
    return model, optimizer


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(32, 8, generator=generator), torch.arange(32) % 4)


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", **SCALE)


def by_accelerate(made: Made) -> list[float]:
    accelerate = pytest.importorskip("accelerate", reason="the thirdparty extra is not installed")
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16")
        accelerator.native_amp, accelerator.scaler = True, scaler()  # as in test_accelerate.py
        model, optimizer, loader = accelerator.prepare(*made, DataLoader(data(), batch_size=4))
        norms = []
        for x, y in loader:
            accelerator.backward(cross_entropy(model(x).float(), y))
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def by_lightning(made: Made) -> list[float]:
    pl = pytest.importorskip("lightning.pytorch", reason="the thirdparty extra is not installed")
    from lightning.pytorch.plugins import MixedPrecision

    norms: list[float] = []

    class Classifier(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.made = made

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return cross_entropy(self.net(batch[0]).float(), batch[1])

        def configure_optimizers(self) -> Any:
            return self.made

        def on_before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            norms.append(torch.nn.utils.get_total_norm(gradients).item())

    names = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        gradient_clip_val=0.5,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler())],
        **dict.fromkeys(names, False),
    )
    trainer.fit(Classifier(), DataLoader(data(), batch_size=4))
    return norms


def by_trainer(made: Made) -> list[float]:
    reason = "the thirdparty extra is not installed"
    pytest.importorskip("accelerate", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    from accelerate.state import AcceleratorState, GradientState

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = made[0]

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.net(x)
            return {"loss": cross_entropy(logits.float(), labels), "logits": logits}

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        arguments = transformers.TrainingArguments(
            output_dir="runs",
            per_device_train_batch_size=4,
            max_steps=8,
            lr_scheduler_type="constant",
            use_cpu=True,
            fp16=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            max_grad_norm=0.5,
            disable_tqdm=True,
        )
        rows = [{"x": x, "labels": y} for x, y in data()]
        trainer = transformers.Trainer(
            Classifier(), arguments, train_dataset=rows, optimizers=(made[1], None)
        )
        trainer.accelerator.native_amp, trainer.accelerator.scaler = True, scaler()
        trainer.train()
        return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


LOOPS: dict[str, Callable[[Made], list[float]]] = {
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "trainer": by_trainer,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_fp16_weights_follow_float32_masters(
    loop: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with installed_fastamp():
        start = [p.detach().clone() for p in make(half=False, opted_in=False)[0].parameters()]
        full = make(half=False, opted_in=False)
        wanted = LOOPS[loop](full)
        half = make(half=True, opted_in=True)
        norms = LOOPS[loop](half)
    assert len(norms) == len(wanted) == 8
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(wanted), rtol=1e-2, atol=0)
    masters = half[1].masters()  # type: ignore[attr-defined]
    for first, p, q in zip(start, half[0].parameters(), full[0].parameters(), strict=True):
        assert p.dtype == torch.float16
        bound = BOUND * (q.detach() - first).abs().max().item()
        torch.testing.assert_close(masters[p], q.detach(), rtol=0, atol=bound)


@pytest.mark.parametrize("loop", LOOPS)
def test_without_the_option_torchs_error_stays(
    loop: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    said = "Attempting to unscale FP16 gradients.*widen_grads=True"
    with installed_fastamp(), pytest.raises(ValueError, match=said):
        LOOPS[loop](make(half=True, opted_in=False))
