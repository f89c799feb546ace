# SPDX-License-Identifier: Apache-2.0
"""What the Python example says about a run: skipped steps, which go through a fused optimizer."""

import argparse
import importlib.util
import math
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import fastamp

FILE = Path(__file__).resolve().parents[2] / "examples" / "python" / "digits_report.py"


@pytest.fixture(scope="module")
def digits_report():
    spec = importlib.util.spec_from_file_location("digits_report", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("bad", [(), (1,), (3, 4, 5), (6,), (1, 2, 3, 4, 5, 6)])
def test_skipped_steps_are_counted(digits_report, bad):
    model = torch.nn.Sequential(OrderedDict(fc1=torch.nn.Linear(3, 1)))
    optimizer = fastamp.optim.SGD(model.parameters(), lr=0.1)
    scaler = fastamp.GradScaler("cpu", init_scale=1024.0)
    options = argparse.Namespace(iters=6, shorter={}, marks=[1], until_loss=0.0)
    row = digits_report.Row(options, "fp32", model, optimizer, scaler)
    for iteration in row:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum() * (math.inf if iteration in bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        row.record(loss)
    row.finish(accuracy=torch.tensor(1.0))
    assert row.facts["skipped"] == len(bad)
    assert row.facts["scale"] == 1024.0 * 0.5 ** len(bad)
