# SPDX-License-Identifier: Apache-2.0
"""Processes that use CUDA: when fastamp is installed, forks, loaders, and the end."""

from __future__ import annotations

import pytest
import torch

from support.children import run_python

pytestmark = pytest.mark.cuda
SECOND = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"

START = f"""
import os, sys, traceback
import torch
SECOND = "{SECOND}"

def train(device="cuda:0", steps=2):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = model(torch.ones(2, 4, device=device)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return type(scaler).__module__

def in_child(function):
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
PROGRAMS = {
    "install() starts no CUDA": """
import fastamp
fastamp.install()
with torch.autocast("cuda"):
    pass
scaler = torch.amp.GradScaler("cuda")
optimizer = fastamp.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
with fastamp.autocast("cpu", dtype=torch.bfloat16):
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
assert not torch.cuda.is_initialized()
assert train().startswith("fastamp")
""",
    "install() after CUDA's start": """
assert train().startswith("torch")
import fastamp
fastamp.install()
assert train().startswith("fastamp") and train(SECOND).startswith("fastamp")
fastamp.uninstall()
assert train().startswith("torch")
""",
    "a fork before CUDA's start": """
import fastamp
fastamp.install()
in_child(train)
assert not torch.cuda.is_initialized()
train()
in_child(lambda: torch.ones(2).sum())
""",
    "a fork after CUDA's start": """
import fastamp
torch.set_num_threads(1)  # OpenMP's other threads are not there after a fork.
fastamp.install()
train()
kept = torch.nn.Linear(4, 4).cuda()
fastamp.casts.keep(kept)
with fastamp.autocast("cuda"):
    kept(torch.ones(2, 4, device="cuda"))

def on_the_host():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.nn.Linear(4, 4)(torch.ones(2, 4))
    with torch.autocast("cuda"):
        pass
    torch.amp.GradScaler("cuda").state_dict()
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 2.0**16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5] * 3
    try:
        train()
    except RuntimeError as error:
        assert "Cannot re-initialize CUDA in forked subprocess" in str(error)
    else:
        raise AssertionError("CUDA in a forked child")

in_child(on_the_host)
train()
""",
    "workers of a loader, with pinned memory": """
import fastamp
fastamp.install()
train()
data = torch.utils.data.TensorDataset(torch.randn(8, 4))
for (batch,) in torch.utils.data.DataLoader(data, 2, num_workers=2, pin_memory=True):
    with torch.autocast("cuda"):
        torch.nn.Linear(4, 4).cuda()(batch.to("cuda", non_blocking=True))
train()
""",
    "an end with all there is alive": """
import fastamp
fastamp.install()
model = torch.nn.Linear(4, 4).to(SECOND)
fastamp.casts.keep(model)
x = torch.ones(2, 4, device=SECOND)
with fastamp.autocast("cuda"):
    unused = model(x)
optimizer = fastamp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = fastamp.GradScaler("cuda", history_size=8)
loss = torch.nn.functional.mse_loss
step = fastamp.cuda.graphed_step(model, loss, optimizer, scaler, (x, x))
step(x, x)
other = fastamp.GradScaler("cuda")
weight = torch.nn.Parameter(torch.ones(3, device="cuda:0"))
other.scale(weight.sum()).backward()
other.step(fastamp.optim.AdamW([weight]))
other.update()  # its numbers are on their way
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that(name):
    done = run_python("-W", "ignore", "-c", START + PROGRAMS[name])
    assert done.returncode == 0, done.stderr
