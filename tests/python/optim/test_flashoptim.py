# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of FlashOptim load: its masters, as parts of half a unit of a 16-bit parameter."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import fastamp
from support.amp_reference import assert_same_bits
from support.optim_state import run, saved_and_loaded

narrow = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
widths = pytest.mark.parametrize("width", [3, 4])
PARTS = {3: 127, 4: 32767}
FORMATS = {torch.float16: (10, 15), torch.bfloat16: (7, 127)}


def half_units(param):
    """Half of the last place of each 16-bit parameter, from its exponent field."""
    digits, bias = FORMATS[param.dtype]
    field = (param.view(torch.int16).numpy().astype(np.int64) & 0x7FFF) >> digits
    return np.ldexp(1.0, np.maximum(field, 1) - bias - digits - 1)


def error_bits(param, master, width):
    """What FlashOptim keeps of a master: rounded half away from zero."""
    parts = (master.double().numpy() - param.double().numpy()) / half_units(param)
    scaled = np.clip(parts, -1, 1) * PARTS[width]
    counts = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    return torch.from_numpy(counts.astype({3: np.int8, 4: np.int16}[width]))


def joined(param, bits, width):
    """The master that it makes of them, in float32."""
    part = bits.numpy().astype(np.float32) / np.float32(PARTS[width])
    whole = param.double().numpy() + part.astype(np.float64) * half_units(param)
    return torch.from_numpy(whole.astype(np.float32))


def checkpoint(param, bits, width):
    """The state dict of its AdamW: all that is not a scalar has the parameter's dtype."""
    stored = bits.to(param.dtype) if width == 3 else bits.view(param.dtype)
    state = {
        "step": torch.tensor(7.0),
        "exp_avg": torch.full_like(param, 0.25),
        "exp_avg_sq": torch.full_like(param, 0.5),
        "error_bits": stored,
    }
    group = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    group.update(master_bytewidth=width, quantize=True, initial_lr=1e-3, params=[0])
    return saved_and_loaded({"state": {0: state}, "param_groups": [group]})


def masters_of_all_kinds(dtype):
    torch.manual_seed(0)
    smallest = torch.finfo(dtype).smallest_normal
    powers = torch.tensor([1.0, -2.0, 0.25]).repeat(400)
    return torch.cat(
        [
            torch.randn(5000),
            powers + torch.randn(1200) * powers * 2.0**-11,  # units differ on both sides
            torch.randn(1000) * smallest,
            torch.zeros(3),
        ]
    )


@narrow
@widths
@pytest.mark.parametrize("master", ["remainder", "float32"])
def test_masters_come_back(dtype, width, master):
    exact = masters_of_all_kinds(dtype)
    param = exact.to(dtype)
    bits = error_bits(param, exact, width)
    wanted = joined(param, bits, width)
    p = torch.nn.Parameter(torch.zeros_like(param))
    optimizer = fastamp.optim.AdamW([p], master=master)
    optimizer.load_state_dict(checkpoint(param, bits, width))
    p.data.copy_(param)  # after the optimizer
    found = optimizer.masters()[p]
    fits = wanted.to(dtype) == param
    assert fits.float().mean() > 0.98
    assert_same_bits(found[fits], wanted[fits])
    assert_same_bits(found.to(dtype), param)
    # All are as near as the bits can say.
    error = np.abs(found.double().numpy() - exact.double().numpy())
    float32_unit = np.spacing(np.abs(exact.numpy())).astype(np.float64)
    assert (error <= half_units(param) * 0.51 / PARTS[width] + float32_unit).all()
    run(optimizer, 1)
    assert_same_bits(p.detach(), param)
    kept = optimizer.state[p]
    assert "error_bits" not in kept
    assert ("master_remainder" if master == "remainder" else "master_param") in kept
    gap = np.abs(optimizer.masters()[p].double().numpy() - found.double().numpy())
    limit = 0.0 if master == "float32" else np.maximum(float32_unit, 2.0**-40)
    assert (gap <= limit).all()
    assert kept["step"] == 8
    assert kept["exp_avg"].dtype is torch.float32


@narrow
@widths
def test_each_parameter_is_its_master_rounded(dtype, width):
    param = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    for count in (-PARTS[width], -PARTS[width] // 2 - 1, -1, 0, 1, 64, PARTS[width]):
        bits = torch.full(param.shape, count, dtype={3: torch.int8, 4: torch.int16}[width])
        p = torch.nn.Parameter(param.clone())
        optimizer = fastamp.optim.AdamW([p], master="remainder")
        optimizer.load_state_dict(checkpoint(param, bits, width))
        found = optimizer.masters()[p].to(dtype)
        same = (found == param) | (torch.isnan(found) & torch.isnan(param))
        largest = param.abs() == torch.finfo(dtype).max  # what is above it rounds to inf
        assert (same | largest).all()
        assert torch.isfinite(found[torch.isfinite(param)]).all()


def test_they_may_be_forgotten_saved_and_replaced():
    master = torch.randn(100, generator=torch.Generator().manual_seed(1))
    param = master.bfloat16()
    saved = checkpoint(param, error_bits(param, master, 4), 4)
    p = torch.nn.Parameter(param.clone())
    optimizer = fastamp.optim.AdamW([p], master="remainder")
    optimizer.load_state_dict(saved)
    before = optimizer.masters()[p]
    assert not torch.equal(before, param.float())
    again = fastamp.optim.AdamW([q := torch.nn.Parameter(param.clone())], master="remainder")
    again.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert_same_bits(again.masters()[q], before)
    assert "error_bits" not in optimizer.state_dict(portable=True)["state"][0]
    optimizer.forget_remainders()
    assert_same_bits(optimizer.masters()[p], param.float())


@pytest.mark.parametrize(
    ("change", "dtype", "text"),
    [
        ({"exp_avg::quantized": torch.zeros(4)}, torch.bfloat16, r"got FlashOptim's exp_avg::quan"),
        (
            {"error_bits": torch.zeros(3)},
            torch.bfloat16,
            r"of shape \(4,\), got torch.float32 of s",
        ),
        ({"error_bits": torch.zeros(4).half()}, torch.bfloat16, "got torch.float16 of shape"),
        ({"error_bits": 3}, torch.bfloat16, "got 3 for torch.bfloat16"),
        ({}, torch.float32, "for torch.float32 and master_bytewidth=4"),
    ],
)
def test_what_is_not_read_is_refused_by_name(change, dtype, text):
    param = torch.ones(4, dtype=torch.bfloat16)
    saved = checkpoint(param, torch.zeros(4, dtype=torch.int16), 4)
    saved["state"][0].update(change)
    p = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = fastamp.optim.AdamW([p], lr=0.125, master="remainder")
    run(optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"load_state_dict: expected .*{text}"):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"][0].keys() == before["state"][0].keys()
    assert all(torch.equal(v, before["state"][0][k]) for k, v in after["state"][0].items())


def test_a_width_that_is_not_known_is_refused():
    param = torch.ones(4, dtype=torch.bfloat16)
    saved = checkpoint(param, torch.zeros(4, dtype=torch.int16), 4)
    del saved["param_groups"][0]["master_bytewidth"]
    optimizer = fastamp.optim.AdamW([torch.nn.Parameter(param)], master="remainder")
    with pytest.raises(ValueError, match="master_bytewidth=None"):
        optimizer.load_state_dict(saved)
