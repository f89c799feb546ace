# SPDX-License-Identifier: Apache-2.0
"""One training loop on several processes: DDP or FSDP2, in fp16 with a scaler, in bf16 or in fp8.

    torchrun --nproc-per-node 2 examples/python/ranks.py --parallel ddp
    torchrun --nproc-per-node 2 examples/python/ranks.py --parallel fsdp2 --dtype fp8

Uses NCCL where there are GPUs, else gloo. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import os
import warnings

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastamp
import fastamp.distributed


def make_model(parallel: str, dtype: str, device: torch.device) -> nn.Module:
    """The same model on all ranks, whole or in shards."""
    torch.manual_seed(0)  # the same weights on all ranks
    model: nn.Module = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
    ).to(device)
    if parallel == "ddp":
        return DistributedDataParallel(model)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    if dtype == "fp8":  # float32 shards, of which two weights are sent in fp8
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        recipe = fastamp.float8.Recipe(small_size=(0, 0))  # for a model as small as this
        fastamp.distributed.float8_all_gather(model, recipe)
    else:
        fully_shard(model, mesh=mesh)  # float32 shards
    return model


def region(dtype: str, device: torch.device) -> fastamp.autocast:
    """What the model runs in."""
    if dtype == "fp8":
        recipe = fastamp.float8.Recipe(small_size=(0, 0))
        return fastamp.autocast(device.type, dtype=torch.bfloat16, float8=recipe)
    return fastamp.autocast(device.type, dtype=torch.float16 if dtype == "fp16" else torch.bfloat16)


def train(parallel: str, dtype: str, steps: int, device: torch.device) -> float:
    """Trains on the ranks of the default group, and returns the accuracy over all of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pixels, digits = load_digits(return_X_y=True)
    x = (torch.tensor(pixels, dtype=torch.float32) / 16)[rank::ranks].to(device)
    y = torch.tensor(digits)[rank::ranks].to(device)
    model = make_model(parallel, dtype, device)
    optimizer = fastamp.optim.AdamW(model.parameters(), lr=2e-3)
    # DDP sums an overflow into all ranks' gradients. Shards may overflow on one rank alone: the
    # scaler agrees over their mesh, so that all ranks skip the step, or none.
    scaler = fastamp.GradScaler(device.type, enabled=dtype == "fp16")

    torch.manual_seed(rank)  # other batches on each rank
    for step in range(steps):
        chosen = torch.randint(len(x), (128,), device=device)
        optimizer.zero_grad()
        with region(dtype, device):
            loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if rank == 0 and (step + 1) % 25 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")

    with torch.no_grad(), region(dtype, device):
        right = (model(x).argmax(1) == y).float().mean()
    dist.all_reduce(right)
    return right.item() / ranks


def main() -> dist.Work:
    """Runs in each process that ``torchrun`` has started; returns the work that ended last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parallel", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp8"], default="fp16")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*slow", category=UserWarning)  # fp8 on CPUs
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    accuracy = train(options.parallel, options.dtype, options.steps, device)
    if dist.get_rank() == 0:
        print(f"{options.parallel}, {options.dtype}: accuracy {accuracy:.1%}")
    all_are_here: dist.Work = dist.barrier(async_op=True)  # gloo ends badly where a rank has left
    all_are_here.wait()
    dist.destroy_process_group()
    return all_are_here


if __name__ == "__main__":
    # Who drops a work last frees its tensors. A thread of gloo's, which FSDP2 keeps, may come to
    # that after Python's end, and would abort the process: so the last one is kept until then.
    last_work = main()
