# SPDX-License-Identifier: Apache-2.0
"""fastamp._protocol lists every private attribute that Python and native code share."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import fastamp
from fastamp import _protocol
from fastamp._scaler.hooks import CoreHooks

PYTHON = Path(__file__).resolve().parents[2] / "python"


def names_in(*files: Path, pattern: str) -> set[str]:
    return {name for file in files for name in re.findall(pattern, file.read_text())}


def listed(protocol: type) -> set[str]:
    methods = {name for name, value in vars(protocol).items() if name.startswith("_fastamp_")}
    return methods | set(protocol.__annotations__)


def private(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("_")}


NATIVE = sorted((PYTHON / "csrc").glob("*.cpp")) + sorted((PYTHON / "csrc").glob("*.h"))
MODULES = [f for f in (PYTHON / "fastamp").rglob("*.py") if f.name != "_protocol.py"]
OPTIMIZER = listed(_protocol.Optimizer)
OTHERS = listed(_protocol.TorchRegion) | listed(_protocol.ShardedTensor)


def test_every_attribute_of_an_optimizer_is_listed_and_used():
    used = names_in(*NATIVE, *MODULES, pattern=r"\b_fastamp_\w+")
    assert used == OPTIMIZER


def test_the_native_code_names_no_private_attribute_that_is_not_listed():
    named = names_in(*NATIVE, pattern=r'"(_[a-z]\w*)"')
    assert named <= OPTIMIZER | OTHERS
    assert private(OTHERS) <= named


def test_the_native_core_calls_every_hook_and_no_other():
    called = names_in(*NATIVE, pattern=r'hooks_?\.attr\("(\w+)"\)')
    assert called == {name for name in vars(CoreHooks) if not name.startswith("_")}


def test_the_entries_of_an_optimizers_state_are_torchs_and_known_to_the_native_code():
    listed_names = set(_protocol.OptimizerState.__annotations__)
    assert set(torch.amp.grad_scaler._refresh_per_optimizer_state()) == listed_names
    assert listed_names <= names_in(*NATIVE, pattern=r'"(\w+)"')


def test_optimizers_have_what_is_listed():
    weight = torch.ones(1, requires_grad=True)
    optimizer = fastamp.optim.SGD([weight], lr=0.1)
    absent = {name for name in OPTIMIZER if not hasattr(optimizer, name)}
    # Those that are there only while a step, a load or a pickle is under way.
    assert absent == {"_fastamp_gate", "_fastamp_source", "_fastamp_autocast_dtype"}
    region = torch.autocast("cpu")
    assert all(hasattr(region, name) for name in listed(_protocol.TorchRegion))
