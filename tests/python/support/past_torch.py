# SPDX-License-Identifier: Apache-2.0
"""States that torch 2.11 has written, and what they are to a torch that reads them.

``python tests/python/support/past_torch.py`` writes ``tests/data/torch-2.11`` anew, which is only
right under that torch: the files are there so that others read them.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

import fastamp
import fastamp.optim

FOLDER = Path(__file__).parents[2] / "data" / "torch-2.11"
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "8-bit moments": (torch.float32, {"state_dtype": "8bit"}),
    "remainders of masters": (torch.bfloat16, {"master": "remainder", "state_dtype": "8bit"}),
}


def folder_of(kind: str) -> Path:
    """Where the distributed checkpoint is."""
    return FOLDER / kind.replace(" ", "-")


class Trained:
    """A model of one matrix that has 8-bit moments, its optimizer and its scaler."""

    def __init__(self, kind: str) -> None:
        dtype, options = KINDS[kind]
        self.model = torch.nn.Linear(64, 64).to(dtype)
        with torch.no_grad():
            for p in self.model.parameters():  # From no generator, which a torch may change.
                p.copy_(numbers(p.shape, 1))
        self.optimizer = fastamp.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.scaler = fastamp.GradScaler("cpu", init_scale=8.0, growth_interval=2, hysteresis=2)

    def train(self, steps: range) -> None:
        for step in steps:
            scale = self.scaler.scale(torch.ones(()))
            for p in self.model.parameters():
                p.grad = (numbers(p.shape, step + 2) * scale).to(p.dtype)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scaler.load_state_dict(state["scaler"])


def numbers(shape: torch.Size, seed: int) -> torch.Tensor:
    """Numbers of many magnitudes, by integer arithmetic, which no version changes."""
    x = (torch.arange(shape.numel()) * 7919 + seed * 104729) * 1103515245 % 2147483647
    return ((x % 4093 - 2046).float() / 2**11 * (x % 61 / 64)).reshape(shape)


def leaves(state: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{where}/{key}")
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            yield from leaves(value, f"{where}/{index}")
    else:
        yield where, state


def bits(value: Any) -> Any:
    """What JSON can hold of a leaf: of a tensor its kind and a digest of its bytes."""
    if not isinstance(value, torch.Tensor):
        return value.hex() if isinstance(value, float) else value
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]


def told(state: Any) -> dict[str, Any]:
    return {where: bits(value) for where, value in leaves(state)}


def write() -> None:
    """All files; ``expected.json`` shows the states, and the same after two more steps."""
    assert torch.__version__.startswith("2.11."), torch.__version__
    FOLDER.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    states, expected = {}, {}
    for kind in KINDS:
        trained = Trained(kind)
        trained.train(range(3))
        states[kind] = copy.deepcopy(trained.state())
        save(states[kind], checkpoint_id=folder_of(kind))
        trained.train(range(3, 5))
        expected[kind] = {"read": told(states[kind]), "later": told(trained.state())}
    torch.save(states, FOLDER / "states.pt")
    text = json.dumps(expected, indent=1, sort_keys=True) + "\n"
    (FOLDER / "expected.json").write_text(text, encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    write()
