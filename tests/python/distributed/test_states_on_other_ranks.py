# SPDX-License-Identifier: Apache-2.0
"""torch's distributed checkpoint: states of some ranks are read on others, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fastamp
import fastamp.optim
from support.amp_reference import assert_same_bits
from support.named_states import NamedState
from support.simulated_ranks import run_on_ranks

RANKS = (1, 3, 8, 2)
OPTIMIZERS = {
    "8-bit moments": (torch.float32, {"state_dtype": "8bit"}),
    "bfloat16 moments": (torch.float32, {"state_dtype": torch.bfloat16}),
    "remainders of masters": (torch.bfloat16, {"master": "remainder"}),
    "remainders and 8 bits": (torch.bfloat16, {"master": "remainder", "state_dtype": "8bit"}),
}


class Trained(NamedState):
    """A sharded model, its optimizer and its scaler, on the ranks there are."""

    def __init__(self, name: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dtype, options = OPTIMIZERS[name]
        torch.manual_seed(0)
        # Rows that divide by none of the numbers of ranks, and a parameter without 8-bit moments.
        layers = torch.nn.Linear(64, 130), torch.nn.Tanh(), torch.nn.Linear(130, 67)
        self.model: Any = torch.nn.Sequential(*layers).to(dtype)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = fastamp.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.scaler = fastamp.GradScaler("cpu", init_scale=8.0, growth_interval=2, hysteresis=2)
        self.dtype = dtype

    def train(self, steps: range) -> None:
        from torch.distributed.tensor import distribute_tensor

        for step in steps:
            generator = torch.Generator().manual_seed(step)
            scale = self.scaler.scale(torch.ones(()))
            for p in self.model.parameters():
                # Not from a backward pass, whose sums over ranks round by their number.
                whole = torch.randn(p.shape, generator=generator).to(self.dtype) * scale
                p.grad = distribute_tensor(whole, p.device_mesh, p.placements)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def read(self, path: Any) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        self.load(state)


def full(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: full(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    return value


def assert_equal_states(one: Any, other: Any, where: str = "") -> int:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        return sum(assert_equal_states(one[key], other[key], f"{where}/{key}") for key in one)
    if isinstance(one, torch.Tensor):
        assert_same_bits(one, other)
        return 1
    assert one == other, where
    return 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_pass_from_ranks_to_ranks(name, tmp_path):
    def first(_: int) -> Any:
        trained = Trained(name)
        trained.train(range(3))
        dcp.save(trained.state(), checkpoint_id=tmp_path / "1")
        return full(trained.state())

    def follow(ranks: int, before: int) -> Any:
        def work(_: int) -> Any:
            trained = Trained(name)
            trained.read(tmp_path / str(before))
            dcp.save(trained.state(), checkpoint_id=tmp_path / str(ranks))
            return full(trained.state())

        return run_on_ranks(ranks, work)

    (outcome,) = run_on_ranks(1, first)
    assert outcome.error is None, outcome.error
    written = outcome.result
    assert written["scaler"]["scale"] == 16.0
    for before, ranks in itertools.pairwise(RANKS):
        for read in follow(ranks, before):
            assert read.error is None, read.error
            assert assert_equal_states(written, read.result) >= 12


def test_training_goes_on_on_other_ranks_as_on_those_that_wrote(tmp_path):

    def write(_: int) -> Any:
        trained = Trained("remainders and 8 bits")
        trained.train(range(2))
        dcp.save(trained.state(), checkpoint_id=tmp_path)
        trained.train(range(2, 4))
        return full(trained.state())

    def read(_: int) -> Any:
        trained = Trained("remainders and 8 bits")
        trained.read(tmp_path)
        trained.train(range(2, 4))
        return full(trained.state())

    written = run_on_ranks(2, write)[0]
    for outcome in run_on_ranks(4, read):
        assert outcome.error is None, outcome.error
        assert assert_equal_states(written.result, outcome.result) >= 12
