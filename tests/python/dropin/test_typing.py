# SPDX-License-Identifier: Apache-2.0
"""Type checkers see torch behind ``fastamp.torch``, and our classes in it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastamp

PROGRAM = """
import fastamp.torch as torch
import fastamp.torch.nn.functional as F
from fastamp.torch import nn
from fastamp.torch.amp.grad_scaler import GradScaler
from fastamp.torch.utils.data import DataLoader

reveal_type(F.relu(torch.relu(torch.ones(2))))
reveal_type(nn.Linear(1, 1))
reveal_type(torch.autocast("cpu"))
reveal_type(torch.amp.autocast_mode.autocast("cpu"))
reveal_type(torch.GradScaler("cpu"))
reveal_type(GradScaler("cpu"))
reveal_type(torch.cuda.amp.autocast())
reveal_type(torch.cuda.is_available())
reveal_type(torch.float16)
reveal_type(torch.optim.SGD(nn.Linear(1, 1).parameters()))
torch.nothing
"""
TYPES = [
    "torch._tensor.Tensor",
    "torch.nn.modules.linear.Linear",
    "fastamp._autocast.region.autocast",
    "fastamp._autocast.region.autocast",
    "fastamp._scaler.grad_scaler.GradScaler",
    "fastamp._scaler.grad_scaler.GradScaler",
    "fastamp.cuda.amp.autocast",
    "bool",
    "torch._C.dtype",
    "torch.optim.sgd.SGD",
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_mypy_reveals_torchs_types_and_fastamps(tmp_path: Path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    cache = tmp_path / "cache"
    options = ["--config-file=", "--strict", "--follow-imports=silent", f"--cache-dir={cache}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(program)],
        env={"MYPYPATH": str(Path(fastamp.__file__).parents[1]), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.findall(r'Revealed type is "([^"]+)"', done.stdout) == TYPES, done.stdout
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1
    assert 'Module has no attribute "nothing"' in errors[0]
