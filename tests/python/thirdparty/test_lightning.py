# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer and Fabric, with fastamp installed behind their backs."""

from __future__ import annotations

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
pytestmark = pytest.mark.filterwarnings("ignore")  # of many kinds


@pytest.fixture(scope="module", autouse=True)  # imported first: it wraps torch.compile for good
def pl() -> Any:
    return pytest.importorskip("lightning.pytorch", reason="the thirdparty extra is not installed")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(32, 8), torch.arange(32) % 4), batch_size=4)


def classifier(pl: Any, manual: bool = False) -> Any:
    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.automatic_optimization = not manual
            self.trace: list[Any] = []

        def training_step(self, batch: Any, step: int) -> torch.Tensor:
            output = self.net(batch[0])
            loss = cross_entropy(output, batch[1])
            scaler = self.trainer.precision_plugin.scaler
            state = scaler.state_dict() if scaler else None
            self.trace.append((loss.item(), str(output.dtype), state))
            if step == 3 and scaler:
                loss = loss * float("inf")
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: Any, _step: int) -> None:
            self.trace.append(str(self.net(batch[0]).dtype))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Classifier()


def plugin(device: str, scaler: str) -> Any:
    from lightning.pytorch.plugins import MixedPrecision

    if scaler == "lightning's":
        made = MixedPrecision("16-mixed", device)
    else:
        made = MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, **SCALE))
    assert is_fastamps(made.scaler)
    return made


def trainer(pl: Any, device: str, **options: Any) -> Any:
    quiet = dict.fromkeys(
        ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False
    )
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, **quiet, **options}
    return pl.Trainer(accelerator=device, devices=1, **options)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulating"])
def test_bf16_mixed_gives_torchs_bits(pl: Any, device: str, options: dict[str, Any]):
    def run() -> Any:
        model = classifier(pl)
        fit = trainer(pl, device, precision="bf16-mixed", gradient_clip_val=0.5, **options)
        fit.fit(model, batches(), batches())
        return model.trace, parameters_of(model)

    trace, _ = same_results(run)
    assert trace[0][1] == trace[-1] == "torch.bfloat16"


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("scaler", ["lightning's", "the user's"])
def test_fp16_plugin_gives_torchs_bits(pl: Any, device: str, scaler: str, manual: bool):
    def run() -> Any:
        model = classifier(pl, manual)
        clip = {} if manual else {"gradient_clip_val": 0.5}
        trainer(pl, device, plugins=[plugin(device, scaler)], **clip).fit(model, batches())
        return model.trace, parameters_of(model)

    trace, _ = same_results(run)
    scales = [state["scale"] for _, _, state in trace]
    assert scales[4] == scales[3] / 2
    assert trace[0][1] == "torch.float16"


def test_a_checkpoint_saved_under_torch_is_resumed_under_fastamp(
    pl: Any, device: str, tmp_path: Path
):
    path = tmp_path / "saved.ckpt"

    def resume() -> Any:
        model = classifier(pl)
        own = plugin(device, "the user's")
        fit = trainer(pl, device, plugins=[own], max_epochs=2)
        fit.fit(model, batches(), ckpt_path=path)
        return model.trace, parameters_of(model), own.scaler.state_dict()

    with plain_torch():
        model = classifier(pl)
        first = trainer(pl, device, plugins=[plugin(device, "the user's")])
        first.fit(model, batches())
        first.save_checkpoint(path)
    with plain_torch():
        expected = resume()
    with installed_fastamp():
        actual = resume()
    assert_same(actual, expected)
    assert actual[0][0][2]["_growth_tracker"] == 0  # eight steps: overflow at the fourth, then four


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_fabric_gives_torchs_bits(device: str, precision: str):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    def run() -> Any:
        scaler = torch.amp.GradScaler(device, **SCALE) if precision == "16-mixed" else None
        fabric = Fabric(
            accelerator=device, devices=1, plugins=[MixedPrecision(precision, device, scaler)]
        )
        model = network()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        trace = []
        for step, (x, y) in enumerate(fabric.setup_dataloaders(batches())):
            loss = cross_entropy(model(x), y)
            overflows = scaler is not None and step == 3
            fabric.backward(loss * float("inf") if overflows else loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            trace.append((loss.item(), norm.item(), scaler.state_dict() if scaler else None))
        return trace, parameters_of(model)

    same_results(run)


def test_a_fastamp_scaler_is_taken_without_installing(pl: Any, device: str):
    from lightning.pytorch.plugins import MixedPrecision

    model = classifier(pl)
    scaler = fastamp.GradScaler(device, **SCALE, min_scale=1.0)
    own = MixedPrecision("16-mixed", device, scaler)
    trainer(pl, device, plugins=[own], gradient_clip_val=0.5).fit(model, batches())
    assert scaler.get_scale() != SCALE["init_scale"]
    assert own.state_dict() == scaler.state_dict()
