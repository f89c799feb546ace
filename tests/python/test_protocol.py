# SPDX-License-Identifier: Apache-2.0
"""fastamp._util.protocol lists every private attribute that Python and native code share."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

import torch

import fastamp
from fastamp._scaler import gradients
from fastamp._util import protocol as _protocol

PYTHON = Path(__file__).resolve().parents[2] / "python"


def names_in(*files: Path, pattern: str) -> set[str]:
    return {name for file in files for name in re.findall(pattern, file.read_text())}


def listed(protocol: type) -> set[str]:
    methods = {name for name in vars(protocol) if name.startswith(("_fastamp_", "_agree_"))}
    return methods | set(protocol.__annotations__)


def private(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("_")}


NATIVE = sorted((PYTHON / "csrc").glob("*.cpp")) + sorted((PYTHON / "csrc").glob("*.h"))
MODULES = [f for f in (PYTHON / "fastamp").rglob("*.py") if f.name != "protocol.py"]
OPTIMIZER = listed(_protocol.Optimizer)
MODULE = listed(_protocol.Module)
OTHERS = set().union(
    *map(
        listed,
        (
            _protocol.AsyncioEvents,
            _protocol.Scaler,
            _protocol.ShardedTensor,
            _protocol.TorchModule,
            _protocol.TorchRegion,
        ),
    )
)


def test_every_attribute_of_optimizers_and_modules_is_listed_and_used():
    used = names_in(*NATIVE, *MODULES, pattern=r"\b_fastamp_\w+")
    assert used == OPTIMIZER | MODULE


def test_the_native_code_names_no_private_attribute_that_is_not_listed():
    named = names_in(*NATIVE, pattern=r'"(_[a-z]\w*)"')
    assert named <= OPTIMIZER | OTHERS
    assert private(OTHERS) <= named


def test_the_native_code_finds_what_it_leaves_to_python():
    called = names_in(*NATIVE, pattern=r'python_function\("(\w+)"\)')
    assert called
    assert all(callable(getattr(gradients, name)) for name in called)


OF_THE_SCALER = ("_scaler/grad_scaler.py", "_scaler/state.py")


def private_accesses(source: str) -> set[str]:
    """Private attributes that a source asks other objects than ``self`` and ``cls`` for."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }


def test_nobody_touches_private_attributes_of_the_scaler_but_its_class():
    scaler = fastamp.GradScaler("cpu", min_scale=1.0, hysteresis=2)
    scaler.scale(torch.ones(()))
    of_regions = set(vars(torch.autocast("cpu")))  # torch's regions have an _enabled, too.
    names = {name for name in dir(scaler) if not name.startswith("__")} - of_regions
    assert {"_scale", "_core", "_per_optimizer_states", "_found_inf_per_device"} <= names
    package = PYTHON / "fastamp"
    touched = {
        str(file.relative_to(package)): private_accesses(file.read_text()) & names
        for file in MODULES
        if str(file.relative_to(package)) not in OF_THE_SCALER
    }
    assert {file: found for file, found in touched.items() if found} == {}
    assert private_accesses("self._a; other._b; self.c._d") == {"_b", "_d"}


def test_the_entries_of_an_optimizers_state_are_torchs_and_known_to_the_native_code():
    listed_names = set(_protocol.OptimizerState.__annotations__)
    assert set(torch.amp.grad_scaler._refresh_per_optimizer_state()) == listed_names
    assert listed_names <= names_in(*NATIVE, pattern=r'"(\w+)"')


def test_optimizers_have_what_is_listed():
    weight = torch.ones(1, requires_grad=True)
    optimizer = fastamp.optim.SGD([weight], lr=0.1)
    absent = {name for name in OPTIMIZER if not hasattr(optimizer, name)}
    # Those that are there only while a step, a load or a pickle is under way.
    assert absent == {"_fastamp_pending_amp_step", "_fastamp_source", "_fastamp_autocast_dtype"}
    region = torch.autocast("cpu")
    assert all(hasattr(region, name) for name in listed(_protocol.TorchRegion))
    module = torch.nn.Linear(1, 1)
    assert all(hasattr(module, name) for name in listed(_protocol.TorchModule))
    assert all(hasattr(asyncio.events, name) for name in listed(_protocol.AsyncioEvents))
