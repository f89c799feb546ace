# SPDX-License-Identifier: Apache-2.0
"""Ranks with a CUDA device each, over NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support import cuda_rank_cases
from support.ranks import results_of_two_ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
STEPS, BAD_STEP = cuda_rank_cases.STEPS, cuda_rank_cases.BAD_STEP


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> Iterator[list[Any]]:
    """What each of two ranks has found."""
    yield from results_of_two_ranks(cuda_rank_cases.run, tmp_path_factory, backend="nccl")


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_ddp_trains_to_the_same_bits_on_all_ranks_and_under_torch(pair):
    for rank in pair:
        jobs = rank["ddp"]
        assert_same(jobs["fastamp"], jobs["torch"])
        assert_same(jobs["fused"], jobs["torch"])
        assert_same(jobs["torch"][1], pair[0]["ddp"]["torch"][1])
        scales = [scale for _, scale in jobs["torch"][0]]
        assert [scale < 65536.0 for scale in scales] == [i >= BAD_STEP for i in range(STEPS)]
    losses = [[loss for loss, _ in rank["ddp"]["torch"][0]] for rank in pair]
    assert losses[0][0] != losses[1][0]


def test_ranks_agree_on_an_overflow_of_one_and_the_first_says_whose_it_was(pair):
    for told, *_ in (rank["agreed"] for rank in pair):
        scales = [scale for _, scale in told]
        assert [scale < 65536.0 for scale in scales] == [i >= BAD_STEP for i in range(STEPS)]
    (_, weights, report), (_, others, _) = (rank["agreed"] for rank in pair)
    assert not torch.equal(weights[0], others[0])  # their data are not the same
    assert {rank for rank, _ in report} == {1}
    assert {name for _, name in report} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_sharded_model_is_clipped_and_stepped_as_a_whole_one(pair):
    for whole, parts in (rank["sharded"] for rank in pair):
        torch.testing.assert_close(parts[0], whole[0])
        torch.testing.assert_close(parts[2], whole[2])
        assert whole[1] in (0, None)
        assert parts[1] in (0, None)  # the norm's all-reduce was the flag's


def test_a_guard_of_all_ranks_skips_for_one(pair):
    for rank in pair:
        assert rank["guarded"] == [True, False]
