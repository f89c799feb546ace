# SPDX-License-Identifier: Apache-2.0
"""Importing fastamp, and using a part of it for the first time, inside the modes of torch."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch

import fastamp
from support.children import check_python

# What raises in a mode whatever library is used: torch itself refuses it there.
_TRANSFORMED = {"backward", "scaler", "optimizer"}
REFUSED_BY_TORCH: dict[str, set[str]] = {
    "fake tensors": {"scaler"},  # A fake overflow flag has no value.
    "make_fx": {"scaler"},
    "vmap": {"backward"},
    "grad": _TRANSFORMED,  # In-place edits of tensors that are not the transform's.
    "jvp": _TRANSFORMED,
    "functionalize": _TRANSFORMED,
    # Weights that require gradients are no constants of a trace.
    "jit.trace": {
        *("cast", "torchs_region", "backward", "scaler", "optimizer", "kept_casts"),
        *("trace", "policies", "install"),
    },
    # uninstall() refuses inside a region.
    "torch's region": {"install"},
    "a disabled region": {"install"},
    "a region without cache": {"install"},
}
MODES = [
    *("none", "inference_mode", "no_grad", "default dtype", "default device", "device context"),
    *("dispatch mode", "fake tensors", "function mode", "vmap", "grad", "jvp", "functionalize"),
    *("make_fx", "jit.trace", "torch's region", "a disabled region", "a region without cache"),
    *("profiler", "anomaly mode", "saved tensor hooks", "deterministic", "backward", "thread"),
]


@functools.cache
def outcomes() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(check_python("-m", "support.first_use"))
    assert set(found["import"]) == set(found["use"]) == set(MODES)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_what_is_trained_after_an_import_in_a_mode_is_as_ever(mode: str):
    assert outcomes()["import"][mode] == {
        "raised": {},
        "trained": outcomes()["import"]["none"]["trained"],
    }


@pytest.mark.parametrize("mode", MODES)
def test_what_is_trained_after_the_first_uses_in_a_mode_is_as_ever(mode: str):
    got = outcomes()["use"][mode]
    assert got["trained"] == outcomes()["import"]["none"]["trained"]
    assert set(got["raised"]) == REFUSED_BY_TORCH.get(mode, set()), got["raised"]


def test_the_reference_is_a_hash_and_no_error():
    assert len(outcomes()["import"]["none"]["trained"]) == 64


def use(scaler: Any) -> list[Any]:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return [scaler.get_scale(), *weight.tolist()]


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_a_scaler_first_used_in_inference_mode_goes_on_outside(hysteresis: int):
    seen = []
    for mode in (torch.no_grad, torch.inference_mode):
        scaler = fastamp.GradScaler("cpu", init_scale=4.0, growth_interval=1, hysteresis=hysteresis)
        with mode():
            results = [use(scaler)]
        results.append(use(scaler))
        assert not scaler._scale.is_inference()
        scaler.update(2.0)
        results.append(use(scaler))
        scaler.load_state_dict(scaler.state_dict())
        seen.append([*results, use(scaler), scaler.state_dict(), scaler.history()])
    assert seen[1] == seen[0]
