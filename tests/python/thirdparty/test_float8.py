# SPDX-License-Identifier: Apache-2.0
"""Libraries that know nothing of fp8 train in it: bfloat16 jobs as with and without ``--float8``.

On the CPU, whose fp8 products are exact, and on small models.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from support.twin_runs import close_in_float8

REASON = "the thirdparty extra is not installed"
STEPS = 8
pytestmark = pytest.mark.filterwarnings("ignore")  # of many kinds


@pytest.fixture(scope="module", autouse=True)  # imported first: it wraps torch.compile for good
def pl() -> Any:
    try:
        return importlib.import_module("lightning.pytorch")
    except ImportError:
        return None


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32))
        self.head = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def samples() -> TensorDataset:
    """The same four samples in each batch, so that the loss falls."""
    return TensorDataset(torch.randn(4, 16).repeat(STEPS, 1), torch.arange(4).repeat(STEPS))


@pytest.fixture
def accelerate() -> Iterator[Any]:
    library = pytest.importorskip("accelerate", reason=REASON)
    yield library
    forget_accelerator()


def forget_accelerator() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_accelerate(accelerate: Any):
    def train() -> Any:
        forget_accelerator()
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        wrapped, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(samples(), batch_size=4)
        )
        losses = []
        for x, y in loader:
            loss = cross_entropy(wrapped(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, accelerator.unwrap_model(wrapped)

    close_in_float8(train, "head")


def test_lightning(pl: Any):
    if pl is None:
        pytest.skip(REASON)

    class Module(pl.LightningModule):
        """Calls the parts of its model and not the model."""

        def __init__(self) -> None:
            super().__init__()
            self.net = Classifier()
            self.losses: list[float] = []

        def training_step(self, batch: Any, _step: int) -> torch.Tensor:
            loss = cross_entropy(self.net.head(self.net.body(batch[0])), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def train() -> Any:
        model = Module()
        names = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
        options = {**dict.fromkeys(names, False), "max_epochs": 1, "gradient_clip_val": 1.0}
        trainer = pl.Trainer(accelerator="cpu", devices=1, precision="bf16-mixed", **options)
        trainer.fit(model, DataLoader(samples(), batch_size=4))
        return model.losses, model

    close_in_float8(train, "net.head")


def bert(library: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = library.BertConfig(
        vocab_size=32, max_position_embeddings=16, intermediate_size=32, num_labels=16, **sizes
    )
    return library.BertForSequenceClassification(config)


def gpt2(library: Any) -> nn.Module:
    """Its layers are Conv1D: addmm with weights that lie the other way round."""
    config = library.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=32, max_position_embeddings=16
    )
    config.bos_token_id = config.eos_token_id = 0
    return library.GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("make", "exclude", "checkpointing"),
    [(bert, "classifier", False), (gpt2, "lm_head", False), (gpt2, "lm_head", True)],
    ids=["BERT", "GPT-2", "GPT-2 with checkpointed layers"],
)
@pytest.mark.usefixtures("accelerate")
def test_the_trainer_of_transformers(make: Any, exclude: str, checkpointing: bool):
    library = pytest.importorskip("transformers", reason=REASON)

    def train() -> Any:
        forget_accelerator()
        model = make(library)
        arguments = library.TrainingArguments(
            output_dir="out",
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=2e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
            dataloader_pin_memory=False,
            bf16=True,
            gradient_checkpointing=checkpointing,
        )
        tokens = torch.randint(0, 32, (4, 12))
        labels = torch.arange(4) if make is bert else tokens
        data = [
            {"input_ids": t, "labels": y, "attention_mask": torch.ones_like(t)}
            for t, y in zip(tokens, labels, strict=True)
        ]
        trainer = library.Trainer(model, arguments, train_dataset=data * STEPS)
        trainer.train()
        history = trainer.state.log_history
        return [row["loss"] for row in history if "loss" in row], model

    close_in_float8(train, exclude)


def test_timm():
    timm = pytest.importorskip("timm", reason=REASON)

    def train() -> Any:
        options = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 16}
        model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model

    close_in_float8(train, "head")
