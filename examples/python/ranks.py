# SPDX-License-Identifier: Apache-2.0
"""One training loop on several processes: DDP or FSDP2, in fp16 with a scaler, or in bf16.

    torchrun --nproc-per-node 2 examples/python/ranks.py --parallel ddp
    torchrun --nproc-per-node 2 examples/python/ranks.py --parallel fsdp2 --dtype bf16

Uses NCCL where there are GPUs, else gloo. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastamp

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--parallel", choices=["ddp", "fsdp2"], default="ddp")
parser.add_argument("--dtype", choices=["bf16", "fp16"], default="fp16")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]

pixels, digits = load_digits(return_X_y=True)
x = (torch.tensor(pixels, dtype=torch.float32) / 16)[rank::ranks].to(device)
y = torch.tensor(digits)[rank::ranks].to(device)

torch.manual_seed(0)  # the same weights on all ranks
model: nn.Module = nn.Sequential(
    nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
).to(device)
if options.parallel == "ddp":
    model = DistributedDataParallel(model)
else:
    fully_shard(model, mesh=dist.init_device_mesh(device.type, (ranks,)))  # float32 shards
optimizer = fastamp.optim.AdamW(model.parameters(), lr=2e-3)
# DDP sums an overflow into all ranks' gradients. Shards may overflow on one rank alone: the scaler
# agrees over their mesh, so that all ranks skip the step, or none.
scaler = fastamp.GradScaler(device.type, enabled=dtype == torch.float16)

torch.manual_seed(rank)  # other batches on each rank
for step in range(options.steps):
    chosen = torch.randint(len(x), (128,), device=device)
    optimizer.zero_grad()
    with fastamp.autocast(device.type, dtype=dtype):
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if rank == 0 and (step + 1) % 25 == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")

with torch.no_grad(), fastamp.autocast(device.type, dtype=dtype):
    right = (model(x).argmax(1) == y).float().mean()
dist.all_reduce(right)
if rank == 0:
    print(f"{options.parallel}, {options.dtype}: accuracy {right.item() / ranks:.1%}")
dist.barrier()  # gloo ends badly, now and then, in a rank that another one has left already
dist.destroy_process_group()
