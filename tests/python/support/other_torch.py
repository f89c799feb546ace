# SPDX-License-Identifier: Apache-2.0
"""States that one torch writes, and what they are to another that reads them.

``PYTHONPATH=tests/python python -m support.other_torch FOLDER`` writes a folder below this one,
named after the torch that runs it; ``FASTAMP_STATES=FOLDER`` has test_states_of_other_torch.py read
all that were written there. ``make compat`` does both with one folder for every torch. Without an
argument ``tests/data/torch-2.11`` is written anew, which only that torch does.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save

import fastamp
import fastamp.optim
from support.named_states import NamedState

COMMITTED = Path(__file__).parents[2] / "data" / "torch-2.11"
#: What another version of this file has written is other states, and not read.
WRITER = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]


class Kind(NamedTuple):
    """What is trained."""

    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    dtype: torch.dtype | None = torch.float32
    """Of the model; None: low_precision_weights_ chooses."""
    width: int = 16
    bias: bool = True


KINDS = {
    "8-bit moments": Kind(fastamp.optim.AdamW, {"state_dtype": "8bit"}, width=64),
    "remainders of masters": Kind(
        fastamp.optim.AdamW, {"master": "remainder", "state_dtype": "8bit"}, torch.bfloat16, 64
    ),
    "remainders of low-precision weights": Kind(
        fastamp.optim.AdamW, {"master": "remainder", "amsgrad": True}, None
    ),
    "masters of low-precision weights": Kind(
        fastamp.optim.Adam, {"state_dtype": torch.bfloat16}, None
    ),
    "momentum of SGD": Kind(
        fastamp.optim.SGD, {"momentum": 0.9, "master": "remainder"}, torch.bfloat16
    ),
    "momentum of Muon": Kind(
        fastamp.optim.Muon, {"master": "remainder"}, torch.bfloat16, bias=False
    ),
}
#: Its steps have matrix products, whose sums a torch and a processor order as they like.
SUMS = frozenset({"momentum of Muon"})


def folders() -> list[Path]:
    """What there is to be read: the committed files, and those of ``FASTAMP_STATES``."""
    others = os.environ.get("FASTAMP_STATES")
    return [COMMITTED, *sorted(Path(others).glob(f"*-{WRITER}") if others else ())]


def distributed(folder: Path, kind: str) -> Path:
    """Where the distributed checkpoint is."""
    return folder / kind.replace(" ", "-")


class Trained(NamedState):
    """A model of one layer, its optimizer and its scaler."""

    def __init__(self, kind: str) -> None:
        made = KINDS[kind]
        self.model = torch.nn.Linear(made.width, made.width, made.bias)
        with torch.no_grad():
            for p in self.model.parameters():  # From no generator, which a torch may change.
                p.copy_(numbers(p.shape, 1))
        if made.dtype is None:
            fastamp.optim.low_precision_weights_(self.model, verbose=False)
        else:
            self.model.to(made.dtype)
        self.optimizer = made.optimizer(self.model.parameters(), lr=0.01, **made.options)
        self.scaler = fastamp.GradScaler("cpu", init_scale=8.0, growth_interval=2, hysteresis=2)

    def train(self, steps: range) -> None:
        for step in steps:
            scale = self.scaler.scale(torch.ones(()))
            for p in self.model.parameters():
                p.grad = (numbers(p.shape, step + 2) * scale).to(p.grad_dtype or p.dtype)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def plain_state(self) -> dict[str, Any]:
        """As ``torch.save`` is given it by most programs."""
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_plain(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
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


def write(folder: Path) -> None:
    """All files; ``expected.json`` shows the states, and the same after two more steps."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    states, expected = {}, {}
    for kind in KINDS:
        trained = Trained(kind)
        trained.train(range(3))
        # Copied one by one: the file would keep that both are the same tensors.
        states[kind] = {
            "state": copy.deepcopy(trained.state()),
            "plain": copy.deepcopy(trained.plain_state()),
        }
        save(states[kind]["state"], checkpoint_id=distributed(folder, kind))
        expected[kind] = {what: told(state) for what, state in states[kind].items()}
        trained.train(range(3, 5))
        if kind not in SUMS:
            expected[kind]["later"] = told(trained.state())
    torch.save(states, folder / "states.pt")
    text = json.dumps(expected, indent=1, sort_keys=True) + "\n"
    (folder / "expected.json").write_text(text, encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:]:
        write(Path(sys.argv[1]) / f"{torch.__version__}-{WRITER}")
    else:
        assert torch.__version__.startswith("2.11."), torch.__version__
        write(COMMITTED)
