# SPDX-License-Identifier: Apache-2.0
"""Every op of torch's operator database with mixed dtypes, under the preset "unify"."""

from __future__ import annotations

import pytest

import fastamp
from nets.test_all_ops import shares
from nets.unified_ops import unified, unified_on_cuda

pytestmark = pytest.mark.usefixtures("one_thread")

# Of the samples of each op, in one round: some 15 s of CPU.
SHARE = 0.04
FAKE_SHARE = 0.01


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_what_torch_accepts_is_torchs_and_what_a_cast_cures_is_cured():
    for seed, share in shares(SHARE):
        tally = unified(seed, share)
        print(tally)
        assert not tally.wrong, "\n\n".join(tally.wrong)
        assert tally.became["accepted"] > (3000 if share == 1 else 60)
        assert tally.became["cured"] > (1000 if share == 1 else 15)
        assert tally.became["curable by no cast of the call"] > 0


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_the_same_in_a_cuda_region_on_fake_tensors():
    for seed, share in shares(FAKE_SHARE):
        tally = unified_on_cuda(seed, share)
        print(tally)
        assert not tally.wrong, "\n\n".join(tally.wrong)
        assert tally.became["cured"] > 0


def test_a_call_that_stays_refused_is_found():
    assert unified(0, 1.0, only="lerp").became["cured"] > 0
    fastamp.policies.register_op("aten::lerp.Tensor", "banned")
    try:
        tally = unified(0, 1.0, only="lerp")
    finally:
        fastamp.policies.unregister_op("aten::lerp.Tensor")
    assert tally.became["left"] > 0
    assert tally.wrong
