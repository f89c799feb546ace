# SPDX-License-Identifier: Apache-2.0
"""The code of docs/distributed.md runs on two and four ranks, and keeps them together."""

from __future__ import annotations

import torch


def test_the_code_of_the_guide_runs_and_leaves_all_ranks_with_one_model(ranks):
    first, *others = [rank["guide"] for rank in ranks]
    assert first["blocks"] == 8
    assert all(weight.isfinite().all() for weights in first["weights"] for weight in weights)
    for other in others:
        assert other["norm"] == first["norm"]
        for weights, same in zip(first["weights"], other["weights"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
