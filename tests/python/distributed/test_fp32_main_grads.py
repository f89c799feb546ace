# SPDX-License-Identifier: Apache-2.0
"""fp32_main_grads: 16-bit weights under DDP train as float32 ones do, bit for bit."""

from __future__ import annotations

import pytest
import torch

from support.fp32_main_grads_cases import BAD_STEP

CASES = [
    "accumulated",
    "small buckets",
    "unused",
    "zeroed late",
    "added on",
    "after failures",
    "unused after failures",
    "called twice",
    "two passes",
    "static",
    "scaled",
]


@pytest.fixture
def results(ranks):
    return [rank["main_grads"] for rank in ranks]


def assert_same_run(one, other):
    assert one[0] == other[0]
    for master, expected in zip(one[1], other[1], strict=True):
        assert torch.equal(master, expected)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_masters_are_those_of_float32_weights(results, case):
    for rank in results:
        assert_same_run(rank[case, "main grads"], rank[case, "float32"])
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                rank[case, "main grads"][1], results[0][case, "float32"][1], strict=True
            )
        )


def test_weights_that_hold_float32_gradients_already_stay_so(results):
    for rank in results:
        assert_same_run(rank["accumulated", "float32 grads"], rank["accumulated", "float32"])


def test_without_it_accumulation_rounds(results):
    for rank in results:
        _, masters, dtypes = rank["accumulated", "16-bit grads"]
        _, expected, _ = rank["accumulated", "float32"]
        assert not all(torch.equal(a, b) for a, b in zip(masters, expected, strict=True))
        assert dtypes == {torch.float32, torch.bfloat16}
        assert rank["accumulated", "main grads"][2] == {torch.float32}


def test_an_overflow_on_one_rank_skips_on_all(results):
    for rank in results:
        trace = rank["scaled", "main grads"][2]
        assert trace == rank["scaled", "float32"][2] == results[0]["scaled", "main grads"][2]
        assert [skipped for _, skipped, _ in trace] == [i == BAD_STEP for i in range(len(trace))]


def test_another_hook_gets_float32_buckets(results):
    for rank in results:
        compressed, exact = rank["compressed"]
        for gradient, expected in zip(compressed, exact, strict=True):
            assert gradient.dtype == expected.dtype == torch.float32
            # Two roundings to bfloat16 of what is summed.
            allowed = 2 * 2.0**-8 * expected.abs().max().item() * len(results)
            assert (gradient - expected).abs().max().item() <= allowed
        assert not all(torch.equal(a, b) for a, b in zip(compressed, exact, strict=True))


def test_refusals_name_what_was_expected(results):
    wanted = {
        "no ddp": "TypeError: fp32_main_grads: expected ddp to be a DistributedDataParallel, got "
        "Linear; without one, fastamp.optim.low_precision_weights_ gives weights gradients in "
        "float32 by itself",
        "views": "ValueError: fp32_main_grads: expected a model without gradient_as_bucket_view, "
        "got one with it: its gradients would be views of 16-bit buckets",
        "float32": "ValueError: fp32_main_grads: expected trained parameters in 16 bits, got none",
        "hook": "TypeError: fp32_main_grads: expected hook to be a function or None, got int",
        "gradient": "ValueError: fp32_main_grads: expected a model without gradients, got one of "
        "weight; call zero_grad() first",
        "unused": "ValueError: fp32_main_grads: expected 16-bit gradients with "
        "find_unused_parameters or static_graph, got float32 of first.weight; give "
        "low_precision_weights_ grads=torch.bfloat16",
        "unchanged": "{torch.bfloat16}",
    }
    for rank in results:
        texts = dict(rank["refusals"])
        assert "register_comm_hook" in texts.pop("hooked")
        assert texts == wanted
