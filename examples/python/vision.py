# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a vision model of timm in bf16 or fp16: ViT, ResNet or any other.

    python examples/python/vision.py --model vit_tiny_patch16_224 --steps 200

Convolutions are slow on CPUs without arithmetic of the dtype: ``--seconds 60`` trains for as many
of the steps as fit into that time.
Without ``--pretrained`` the weights are random and nothing is downloaded. The images are
scikit-learn's digits. Needs timm, scikit-learn and tqdm.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate
from tqdm import tqdm

import fastamp

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--model", default="resnet18", help="a name that timm knows")
parser.add_argument("--pretrained", action="store_true", help="download timm's weights")
parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--seconds", type=float, help="fewer steps, if they would take longer")
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--size", type=int, default=32, help="height and width of the images")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
torch.manual_seed(0)

pixels, digits = load_digits(return_X_y=True)
images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(digits)
test = torch.arange(len(labels)) % 5 == 0  # every fifth image is not trained on


def batch_of(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of three channels, and their labels."""
    x = interpolate(images[chosen].to(device), size=options.size, mode="bilinear")
    return x.expand(-1, 3, -1, -1).contiguous(), labels[chosen].to(device)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random batches of images to train on."""
    trained = torch.nonzero(~test).flatten()
    for _ in range(steps):
        yield batch_of(trained[torch.randint(len(trained), (options.batch,))])


sized = {"img_size": options.size} if options.model.startswith(("vit", "deit")) else {}
model = timm.create_model(options.model, pretrained=options.pretrained, num_classes=10, **sized)
model = model.to(device)


def step_seconds() -> float:
    """Measures how long a step takes, but for the optimizer's part: the second of two."""
    x, y = batch_of(torch.arange(options.batch))
    for _ in range(2):
        start = time.perf_counter()
        with fastamp.autocast(device, dtype=dtype):
            loss = cross_entropy(model(x), y)
        loss.backward()
        loss.item()  # waits for the device
    model.zero_grad()
    return time.perf_counter() - start


steps = options.steps
if options.seconds is not None:
    steps = max(1, min(steps, int(options.seconds / step_seconds())))
# One pass over memory per step; between steps, regions find the weights already cast.
optimizer = fastamp.optim.AdamW(model.parameters(), lr=1e-3, autocast_dtype=dtype)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
scaler = fastamp.GradScaler(device, enabled=dtype == torch.float16)
if scaler.is_enabled() and any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules()):
    scaler.restore_on_skip(model)  # or a batch that overflows leaves NaN in running statistics

for x, y in (progress := tqdm(batches(), total=steps)):
    optimizer.zero_grad()
    with fastamp.autocast(device, dtype=dtype):
        loss = cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)  # part of the step: no pass of its own
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    if progress.n % 20 == 0:  # reading the loss waits for the device
        progress.set_postfix(loss=f"{loss.item():.3f}")

model.eval()
with torch.no_grad(), fastamp.autocast(device, dtype=dtype):
    x, y = batch_of(torch.nonzero(test).flatten())
    accuracy = (model(x).argmax(1) == y).float().mean().item()
print(f"{options.model}, {options.dtype}: accuracy {accuracy:.1%} on {len(y)} images", end="")
print(f" after {steps} of {options.steps} steps")
