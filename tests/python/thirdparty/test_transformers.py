# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Hugging Face transformers on tiny random models, with fastamp installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.twin_runs import is_fastamps, parameters_of, same_results

TINY = {"vocab_size": 32, "max_position_embeddings": 16}
pytestmark = pytest.mark.filterwarnings("ignore")  # of many kinds


@pytest.fixture(autouse=True)
def transformers() -> Iterator[Any]:
    reason = "the thirdparty extra is not installed"
    pytest.importorskip("accelerate", reason=reason)
    library = pytest.importorskip("transformers", reason=reason)
    yield library
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def bert(transformers: Any) -> torch.nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(intermediate_size=32, num_labels=4, **sizes, **TINY)
    return transformers.BertForSequenceClassification(config)


def gpt2(transformers: Any) -> torch.nn.Module:
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, **TINY)
    config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def rows(kind: str, count: int = 16) -> list[dict[str, Any]]:
    tokens = torch.randint(0, 32, (count, 12))
    labels = torch.arange(count) % 4 if kind == "bert" else tokens
    return [
        {"input_ids": t, "labels": y, "attention_mask": torch.ones_like(t)}
        for t, y in zip(tokens, labels, strict=True)
    ]


MODELS = {"bert": bert, "gpt2": gpt2}


def train(library: Any, kind: str, device: str, precision: str, **options: Any) -> Any:
    model = MODELS[kind](library)
    arguments = library.TrainingArguments(
        output_dir="out",
        use_cpu=device == "cpu",
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        dataloader_pin_memory=False,
        **{precision: True},
        **options,
    )
    data = rows(kind)
    trainer = library.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
    accelerator = trainer.accelerator
    if precision == "fp16":
        if device == "cpu":  # as in test_accelerate.py
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        assert is_fastamps(accelerator.scaler)
    trainer.train()
    losses = [(row.get("loss"), row.get("grad_norm")) for row in trainer.state.log_history]
    predicted = torch.from_numpy(trainer.predict(data[:4]).predictions)
    scale = accelerator.scaler.state_dict() if accelerator.scaler else None
    return losses, parameters_of(model), predicted, scale, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", MODELS)
def test_training_gives_torchs_bits(transformers: Any, kind: str, precision: str, device: str):
    _, _, _, scale, _ = same_results(lambda: train(transformers, kind, device, precision))
    if precision == "fp16" and device == "cpu":
        assert scale["scale"] < 2.0**40  # the steps began with overflows


@pytest.mark.parametrize("kind", MODELS)
def test_accumulation_and_checkpointed_layers_give_torchs_bits(
    transformers: Any, kind: str, device: str, tmp_path: Path
):
    options = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    same_results(lambda: train(transformers, kind, device, "bf16", **options))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_generation_in_a_region_gives_torchs_tokens_and_logits(
    transformers: Any, device: str, dtype: torch.dtype
):
    def run() -> Any:
        model = gpt2(transformers).to(device).eval()
        prompt = torch.randint(1, 32, (2, 4), device=device)
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        details = {"output_logits": True, "return_dict_in_generate": True}
        with torch.autocast(device, dtype=dtype):
            mask = torch.ones_like(prompt)
            made = model.generate(prompt, attention_mask=mask, **options, **details)
        return made.sequences.cpu(), [step.cpu() for step in made.logits]

    sequences, _ = same_results(run)
    assert sequences.shape[1] > 4
