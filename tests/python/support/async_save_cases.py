# SPDX-License-Identifier: Apache-2.0
"""``async_save`` of torch's distributed checkpoint while the next steps run, on gloo ranks."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import fastamp
import fastamp.optim
from support.named_states import NamedState

OPTIONS: dict[str, dict[str, Any]] = {
    "8-bit moments": {"state_dtype": "8bit"},
    "remainders": {"master": "remainder", "state_dtype": torch.bfloat16},
}


class _Trained(NamedState):
    def __init__(self, options: dict[str, Any], seed: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(seed)
        self.model: Any = torch.nn.Linear(64, 131)
        if "master" in options:
            self.model.to(torch.bfloat16)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = fastamp.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.scaler = fastamp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

    def step(self) -> None:
        x = torch.ones(2, 64, dtype=next(self.model.parameters()).dtype)
        self.scaler.scale(self.model(x).float().square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def _values(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [value for key in state for value in _values(state[key])]
    if isinstance(state, torch.Tensor):
        local = state.to_local() if hasattr(state, "to_local") else state
        return [local.detach().clone()]
    return [state]


def _equal(own: list[Any], torchs: list[Any]) -> list[bool]:
    return [
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(own, torchs, strict=True)
    ]


def _saved_during_steps(options: dict[str, Any]) -> dict[str, Any]:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    trained = _Trained(options, 0)
    for _ in range(2):
        trained.step()
    state = trained.state()
    written = _values(state)
    # Of its own: the saving thread talks to others while steps do.
    group = dist.new_group(backend="gloo")
    saving: Any = dcp.async_save(state, checkpoint_id=folder[0], process_group=group)
    for _ in range(3):
        trained.step()
    saving.result()
    later = _values(trained.state())
    other = _Trained(options, 1)
    state = other.state()
    dcp.load(state, checkpoint_id=folder[0])
    other.load(state)
    read = _values(other.state())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]))
    return {"equal": _equal(written, read), "moved": not all(_equal(written, later))}


def run(_: int) -> dict[str, Any]:
    return {name: _saved_during_steps(options) for name, options in OPTIONS.items()}
