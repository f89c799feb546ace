# SPDX-License-Identifier: Apache-2.0
"""Every op of torch's operator database, under fastamp's kernels and under torch's."""

from __future__ import annotations

import pytest
import torch

import fastamp
from nets.all_ops import Call, Samples, compare, cuda_failures, database, failures
from nets.rounds import rounds
from support.autocast_state import torch_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

# Of the samples of each op, in one round: some 10 s of CPU. All of them: 200 s.
SHARE = 0.04
FAKE_SHARE = 0.01
ALL = 10  # rounds from which on every sample runs


# Failures of the past, as the net printed them.
PAST: list[Call] = []


def shares(share: float) -> list[tuple[int, float]]:
    """Seeds and shares of all rounds."""
    count = rounds()
    if count >= ALL:
        return [(seed, 1.0) for seed in range(count // ALL)]
    return [(seed, share) for seed in range(count)]


@pytest.mark.parametrize("call", PAST, ids=[f"{c.op}-{c.sample}-{c.dtype}" for c in PAST])
def test_past_failure(call: Call):
    assert not [text for _, text in compare(Samples(database()[call.op]), [call])]


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_every_op_gives_torchs_results():
    for seed, share in shares(SHARE):
        count, texts = failures(seed, share)
        assert count > (100_000 if share == 1 else 1000)
        assert not texts, "\n\n".join(texts)


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_every_op_has_torchs_dtypes_in_a_cuda_region_on_fake_tensors():
    for seed, share in shares(FAKE_SHARE):
        ran, texts = cuda_failures(seed, share)
        assert ran > (20_000 if share == 1 else 200)
        assert not texts, "\n\n".join(texts)


def kernels_of_every_op() -> dict[tuple[str, str], bool]:
    """Whether torch's dispatcher has a kernel of its own for an op under an autocast key."""
    return {
        (name, key): torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        for name in torch._C._dispatch_get_all_op_names()
        for key in ("AutocastCPU", "AutocastCUDA")
        if not name.startswith("fastamp")
    }


def test_no_op_is_touched_that_torch_does_not_autocast():
    own = kernels_of_every_op()
    with torch_kernels():
        torchs = kernels_of_every_op()
    assert len(own) > 5000
    encoder_layer = "aten::_transformer_encoder_layer_fwd"  # the one beyond torch's list
    assert own.pop((encoder_layer, "AutocastCPU"))
    assert not torchs.pop((encoder_layer, "AutocastCPU"))
    assert own == torchs
    ops = {f"aten::{row.op}" for row in fastamp.policies.table()}
    touched = {name for (name, key), has in own.items() if has and name.startswith("aten::")}
    assert len(touched) > 100
    assert touched <= ops | {name.removesuffix(".default") for name in ops}


def test_a_wrong_policy_is_found_and_its_call_shrunk():
    fastamp.policies.set("addcdiv", "lower")
    try:
        _, texts = failures(0, 1.0, only="addcdiv")
    finally:
        fastamp.policies.reset()
    assert len(texts) == 1
    assert "sample=0" in texts[0]
    assert "twice=False" in texts[0]
    assert failures(0, 1.0, only="addcdiv")[1] == []
