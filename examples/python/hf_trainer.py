# SPDX-License-Identifier: Apache-2.0
"""A program for Hugging Face's Trainer that knows nothing of fastamp.

    python -m fastamp examples/python/hf_trainer.py

The Trainer opens torch's autocast regions; under ``python -m fastamp`` they are fastamp's. Needs
transformers and accelerate. The model is a small BERT with random weights.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()
torch.manual_seed(0)

# The task: which of the four quarters of the alphabet is in the majority?
tokens = torch.randint(0, 32, (2048, 15))
labels = torch.stack([(tokens // 8 == quarter).sum(1) for quarter in range(4)]).argmax(0)
rows = [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]

config = BertConfig(
    vocab_size=32,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=128,
    num_labels=4,
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=options.steps,
        per_device_train_batch_size=64,
        learning_rate=2e-3,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        logging_steps=20,
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows[:-256])
    trainer.train()
    found = trainer.predict(rows[-256:])
accuracy = (found.predictions.argmax(1) == found.label_ids).mean()
print(f"bf16: accuracy {accuracy:.1%}")
