# SPDX-License-Identifier: Apache-2.0
"""Trains an MLP on handwritten digits in fp32, bf16, fp16 and fp8, with fastamp's scaler and SGD.

python examples/data/digits.py digits.pt && python examples/python/digits.py digits.pt
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from digits_report import Report, parse_options
from torch import nn

import fastamp

options = parse_options(__doc__)
device = "cuda" if torch.cuda.is_available() else "cpu"
data = torch.load(options.data, map_location=device)
report = Report(options, device)

# By mode, the dtype of its region; in fp8 run linear layers, and all else in bf16.
MODES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}

for mode, dtype in MODES.items():
    layers = {"fc1": nn.Linear(64, 256), "relu": nn.ReLU(), "fc2": nn.Linear(256, 10)}
    model = nn.Sequential(OrderedDict(layers)).to(device)
    model.load_state_dict(data["model"])
    criterion = nn.CrossEntropyLoss()
    optimizer = fastamp.optim.SGD(model.parameters(), lr=0.01)
    scaler = fastamp.GradScaler(device, enabled=mode == "fp16")
    # On a GPU, layers as small as these stay in bfloat16 by default.
    recipe = fastamp.float8.Recipe(small_size=(0, 0)) if mode == "fp8" else None
    region = fastamp.autocast(device, dtype, enabled=mode != "fp32", float8=recipe)

    row = report.add_row(mode, model, optimizer, scaler)
    for _ in row:
        optimizer.zero_grad()
        with region:
            loss = criterion(model(data["x"]), data["y"])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        row.record(loss)

    with torch.no_grad(), region:
        row.finish(accuracy=(model(data["x"]).argmax(1) == data["y"]).float().mean())

report.print()
