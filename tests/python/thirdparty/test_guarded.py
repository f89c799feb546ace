# SPDX-License-Identifier: Apache-2.0
"""Guarded steps in bfloat16 under Accelerate, Lightning and the Trainer of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fastamp
from fastamp._install import guarded_optimizers
from support.twin_runs import assert_same, installed_fastamp, parameters_of, plain_torch

pytestmark = pytest.mark.filterwarnings("ignore")  # of many kinds
OPTIMIZERS = ["AdamW", "SGD", "fused AdamW"]


@contextmanager
def guarded() -> Iterator[None]:
    with installed_fastamp(), guarded_optimizers.start():
        yield


@pytest.fixture(scope="module", autouse=True)
def _lightning() -> None:
    with contextlib.suppress(ImportError):  # Imported first: it wraps torch.compile for good.
        import lightning.pytorch  # noqa: F401


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def batches(spoilt: int = -1) -> DataLoader[Any]:
    x = torch.randn(32, 8)
    if spoilt >= 0:
        x[4 * spoilt, 3] = float("nan")
    return DataLoader(TensorDataset(x, torch.arange(32) % 4), batch_size=4)


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused AdamW" or None)


def by_accelerate(kind: str, spoilt: int = -1) -> dict[str, torch.Tensor]:
    accelerate = pytest.importorskip("accelerate", reason="the thirdparty extra is not installed")
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    plain = network()
    optimizer = make(kind, plain)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    prepared = accelerator.prepare(plain, optimizer, scheduler, batches(spoilt))
    model, optimizer, scheduler, loader = prepared
    for x, y in loader:
        accelerator.backward(cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return parameters_of(plain)


def by_lightning(kind: str, spoilt: int = -1) -> dict[str, torch.Tensor]:
    pl = pytest.importorskip("lightning.pytorch", reason="the thirdparty extra is not installed")

    class Classifier(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return make(kind, self)

    model = Classifier()
    names = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
    clip = {} if kind == "fused AdamW" else {"gradient_clip_val": 0.5}  # Lightning refuses both.
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        precision="bf16-mixed",
        **clip,
        **dict.fromkeys(names, False),
    )
    trainer.fit(model, batches(spoilt))
    return parameters_of(model)


def by_trainer(kind: str, spoilt: int = -1) -> dict[str, torch.Tensor]:
    reason = "the thirdparty extra is not installed"
    pytest.importorskip("accelerate", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.net(x)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    model = Classifier()
    data = [{"x": x, "labels": y} for x, y in batches(spoilt).dataset]
    arguments = transformers.TrainingArguments(
        output_dir="runs",
        per_device_train_batch_size=4,
        max_steps=8,
        use_cpu=True,
        bf16=True,
        report_to=[],
        save_strategy="no",
        max_grad_norm=0.5,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, optimizers=(make(kind, model), None)
    )
    trainer.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return parameters_of(model)


LOOPS = {"accelerate": by_accelerate, "lightning": by_lightning, "trainer": by_trainer}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("loop", LOOPS)
def test_finite_runs_have_torchs_bits(
    loop: str, kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with plain_torch():
        torchs = LOOPS[loop](kind)
    with guarded():
        own = LOOPS[loop](kind)
    assert_same(own, torchs)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_nan_in_a_batch_is_survived(
    loop: str, kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with plain_torch():
        torchs = LOOPS[loop](kind, spoilt=3)
    assert not all(torch.isfinite(p).all() for p in torchs.values())
    with guarded():
        own = LOOPS[loop](kind, spoilt=3)
    assert all(torch.isfinite(p).all() for p in own.values())
    assert not fastamp.is_installed()
