# SPDX-License-Identifier: Apache-2.0
"""A further micro-batch's gradient of a weight is added within the product, where torch has the op.

torch has it from 2.15 on, and only for CUDA. Here it has a kernel for the CPU, by its definition,
and where torch is older the op itself, of the same schema; in a program of its own.
"""

from __future__ import annotations

import json

import pytest
import torch

from support import scaled_addmm
from support.children import run_program

ADDED = ["_scaled_addmm_.default"]
APART = ["_scaled_mm.default", "add_.Tensor"]


@pytest.fixture(scope="module")
def results():
    done = run_program("-m", "support.gradient_sum_cases", "cpu")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_schema_is_that_of_torch():
    if not scaled_addmm.is_torchs():
        pytest.skip("torch without _scaled_addmm_")
    found = {str(s) for s in torch._C._jit_get_all_schemas() if s.name == "aten::_scaled_addmm_"}
    assert found == {f"aten::{scaled_addmm.SCHEMA}"}


@pytest.mark.parametrize("case", ["float32_weights", "low_precision_weights"])
def test_the_product_adds_to_the_gradient_with_the_bits_of_adding_apart(results, case):
    got = results[case]
    assert "raised" not in got, got["raised"]
    assert got["ops"][1:] == [ADDED, ADDED]
    assert ADDED[0] not in got["ops"][0]
    assert got["equal"]
    assert got["dtype"] == "torch.float32"
    assert got["versions"] == sorted(set(got["versions"]))  # what saved it learns of the change


def test_gradients_in_16_bits_are_rounded_once(results):
    got = results["float16_weights_and_gradients"]
    assert got == {"ops": ADDED, "rounded once": True, "as rounded twice": False}


def test_weights_that_mm_multiplies(results):
    assert results["weights_of_mm"] == {"ops": ADDED, "equal": True}


def test_each_use_of_a_weight_is_added(results):
    assert results["used_twice"] == {"ops": 2 * ADDED, "equal": True}


def test_threads_do_not_overwrite_each_others_sums(results):
    assert results["two_threads"] == {"ops": ADDED, "equal": True}


#: What keeps a gradient from being added within the product, and what is told of it then.
KEPT_APART = {
    "hook_of_the_weight": True,
    "hook_after_accumulation": 1,
    "hooks_of_the_accumulator": [True, True],
    "hook_of_the_product": [True],
    "anomaly_mode": None,
    "gradient_of_another_layout": None,
    "gradient_that_is_not_aligned": None,
    "gradient_with_a_history": None,
    "weight_that_is_transposed": None,
    "low_precision_weights_with_a_hook": 1,
    "weight_that_is_computed": None,
    "gradients_that_are_returned": True,
    "backward_for_some_leaves": True,
    "create_graph": None,
}


@pytest.mark.parametrize("case", KEPT_APART)
def test_whoever_looks_at_a_gradient_gets_it(results, case):
    got = results[case]
    assert "raised" not in got, got["raised"]
    assert ADDED[0] not in got["ops"]
    assert "_scaled_mm.default" in got["ops"]
    assert got["equal"]
    assert got.get("told") == KEPT_APART[case]
