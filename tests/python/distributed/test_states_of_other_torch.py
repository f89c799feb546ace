# SPDX-License-Identifier: Apache-2.0
"""Files that another torch has written are read by the torch that is here, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from support.other_torch import COMMITTED, KINDS, SUMS, Trained, distributed, folders, told
from support.simulated_ranks import run_on_ranks

all_folders = pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
all_kinds = pytest.mark.parametrize("kind", KINDS)


def expected(folder: Path) -> Any:
    return json.loads((folder / "expected.json").read_text(encoding="utf-8"))


@all_folders
@all_kinds
def test_what_torch_save_has_written(folder, kind):
    written = expected(folder)[kind]
    states = torch.load(folder / "states.pt", weights_only=True)[kind]
    by_name, plain = Trained(kind), Trained(kind)
    by_name.load(states["state"])
    plain.load_plain(states["plain"])
    for trained in (by_name, plain):
        assert told(trained.state()) == written["state"]
        assert told(trained.plain_state()) == written["plain"]
        trained.train(range(3, 5))
    later = told(plain.state())
    assert told(by_name.state()) == later
    assert kind in SUMS or later == written["later"]


@all_folders
@all_kinds
def test_what_the_distributed_checkpoint_has_written(folder, kind):
    if folder != COMMITTED:  # torch 2.11 fails on the metadata that 2.15 writes.
        try:
            dcp.FileSystemReader(distributed(folder, kind)).read_metadata()
        except ValueError as error:
            pytest.skip(f"this torch does not read the metadata of {folder.name}: {error}")

    def work(_: int) -> None:
        written = expected(folder)[kind]
        trained = Trained(kind)
        state = trained.state()
        dcp.load(state, checkpoint_id=distributed(folder, kind))
        assert told(state) == written["state"]
        trained.load(state)
        assert told(trained.state()) == written["state"]
        trained.train(range(3, 5))
        assert kind in SUMS or told(trained.state()) == written["later"]

    (outcome,) = run_on_ranks(1, work)
    assert outcome.error is None, outcome.error


def test_the_files_hold_what_they_are_for():
    written = expected(COMMITTED)
    assert written.keys() == KINDS.keys()
    for kind, of in written.items():
        assert of["state"]["/scaler/scale"] != float(8).hex()
        assert any("remainder" in key for key in of["state"]) == ("master" in KINDS[kind].options)
        assert ("later" in of) == (kind not in SUMS)
        if kind not in SUMS:
            pairs = [(bits, of["later"][key]) for key, bits in of["state"].items()]
            moved = [before for before, after in pairs if before != after]
            assert len([bits for bits in moved if isinstance(bits, list)]) >= 5
    assert any("exp_avg_8" in key for key in written["8-bit moments"]["state"])
    assert any("master_param" in k for k in written["masters of low-precision weights"]["state"])
    for kind in ("momentum of SGD", "momentum of Muon"):
        assert any("momentum_buffer" in key for key in written[kind]["state"])
