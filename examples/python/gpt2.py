# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT-2 on text: accumulation, clipping, a schedule, checkpoints and resume.

    python examples/python/gpt2.py --steps 300 --checkpoint gpt2.pt
    python examples/python/gpt2.py --steps 600 --checkpoint gpt2.pt    # goes on where it stopped

The text is the Python reference that ``help()`` shows, byte by byte. Needs transformers and tqdm.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tqdm import trange
from transformers import GPT2Config, GPT2LMHeadModel

import fastamp

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--accumulate", type=int, default=4, help="backward passes per step")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--checkpoint", type=Path, help="read if it is there; written at the end")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
torch.manual_seed(0)

text = "\n".join(topics[name] for name in sorted(topics)).encode()
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
train, valid = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]


def batch_of(text: torch.Tensor, seed: int) -> torch.Tensor:
    """Makes the same batch for the same seed, so that a resumed run sees what the first had."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - options.length, (options.batch,), generator=generator)
    return torch.stack([text[s : s + options.length] for s in starts.tolist()]).to(device)


config = GPT2Config(
    vocab_size=256,
    n_positions=options.length,
    n_embd=options.width,
    n_layer=options.layers,
    n_head=options.width // 32,
    bos_token_id=0,
    eos_token_id=0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
model = GPT2LMHeadModel(config).to(device)
optimizer = fastamp.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
scaler = fastamp.GradScaler(device, enabled=dtype == torch.float16)
parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}

first = 0
if options.checkpoint and options.checkpoint.exists():
    saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    first = saved["steps"]

for step in (progress := trange(first, options.steps)):
    optimizer.zero_grad()
    for part in range(options.accumulate):
        x = batch_of(train, step * options.accumulate + part)
        with fastamp.autocast(device, dtype=dtype):
            loss = model(input_ids=x, labels=x).loss / options.accumulate
        scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    if step % 20 == 0:  # reading the loss waits for the device
        progress.set_postfix(loss=f"{loss.item() * options.accumulate:.3f}")

model.eval()
with torch.no_grad(), fastamp.autocast(device, dtype=dtype):
    losses = [model(input_ids=x, labels=x).loss for x in (batch_of(valid, s) for s in range(8))]
print(f"{options.dtype}: validation loss {torch.stack(losses).mean().item():.4f}")

if options.checkpoint:
    state = {name: part.state_dict() for name, part in parts.items()}
    unfinished = options.checkpoint.with_suffix(".tmp")
    torch.save({"steps": max(first, options.steps), **state}, unfinished)
    unfinished.replace(options.checkpoint)  # never half a checkpoint
