# SPDX-License-Identifier: Apache-2.0
"""Norms over shards and copies on two and four ranks are those of the whole model in float64."""

from __future__ import annotations

import pytest
import torch

from support.mesh_norm_cases import MAX_NORM, ORDERS, full_gradients

orders = pytest.mark.parametrize("order", ORDERS)


@pytest.fixture
def results(ranks):
    return [rank["mesh"] for rank in ranks]


def full_norm(count, order=2.0):
    """Each weight and bias once, whatever number of ranks has copies of it."""
    stages = full_gradients(count // 2)
    everything = torch.cat([g.flatten().double() for stage in stages for g in stage.values()])
    return torch.linalg.vector_norm(everything, order).item()


def expected_gradients(count, rank, order=2.0):
    factor = min(1.0, MAX_NORM / (full_norm(count, order) + 1e-6))
    stage = full_gradients(count // 2)[rank // 2]
    return [stage["weight"].chunk(2)[rank % 2] * factor, stage["bias"] * factor]


def assert_close(tensors, others):
    for tensor, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-6, atol=0.0)


@orders
def test_a_norm_counts_each_gradient_of_the_model_once(results, order):
    for number, rank in enumerate(results):
        norm, gradients = rank["clip", order]
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(full_norm(len(results), order), rel=1e-7)
        assert_close(gradients, expected_gradients(len(results), number, order))
        assert torch.equal(norm, results[0]["clip", order][0])


@orders
@pytest.mark.parametrize("kind", ["torch", "fused"])
def test_a_scalers_clip_is_by_that_norm(results, order, kind):
    for number, rank in enumerate(results):
        norm, steps, skipped, noted = rank[kind, order]
        assert norm.item() == pytest.approx(full_norm(len(results), order), rel=1e-7)
        assert_close(steps, expected_gradients(len(results), number, order))
        assert not skipped
        if order == 2.0:
            assert noted == pytest.approx(norm.item())


@pytest.mark.parametrize("kind", ["torch", "fused"])
@pytest.mark.parametrize("case", ["bad", "bad inf"])
def test_an_overflow_of_one_shard_skips_on_all_ranks(results, kind, case):
    for rank in results:
        norm, steps, skipped, _ = rank[case, kind]
        assert not norm.isfinite()
        assert skipped
        assert all(torch.equal(step, torch.zeros_like(step)) for step in steps)


def test_a_mesh_alone_says_that_all_gradients_are_shards(results):
    whole = full_gradients(1)[0]["weight"]
    count = len(results)
    for rank in results:
        found = rank["all sharded"]
        for dtype in (torch.float16, torch.float32, torch.float64):
            norm = torch.linalg.vector_norm(whole.to(dtype).double()).item()
            assert found[dtype].item() == pytest.approx(norm, rel=1e-7)
        assert found[torch.float64].dtype == torch.float64
        others = torch.cat(whole.chunk(count)[:-1]).double()
        norm = torch.linalg.vector_norm(others).item()
        assert found["without"].item() == pytest.approx(norm, rel=1e-7)


def test_dtensors_are_summed_over_their_own_mesh_and_no_other_twice(results):
    for number, rank in enumerate(results):
        norm, gradients = rank["dtensors"]
        assert norm.item() == pytest.approx(full_norm(len(results)), rel=1e-6)
        assert_close(gradients, expected_gradients(len(results), number))


def test_a_disabled_scaler_clips_too(results):
    for rank in results:
        assert rank["disabled"].item() == pytest.approx(full_norm(len(results)), rel=1e-7)


def test_refusals_name_what_was_expected(results):
    wanted = {
        "type": "TypeError: clip_grad_norm_: expected mesh to be a DeviceMesh or a mapping from "
        "process groups to parameters, got str",
        "key": "TypeError: clip_grad_norm_: expected groups as the keys of mesh, got str",
        "none": "TypeError: clip_grad_norm_: expected groups as the keys of mesh, got NoneType",
        "values": "TypeError: clip_grad_norm_: expected the values of mesh to be lists of "
        "parameters or None, got one with a str",
        "order": "ValueError: clip_grad_norm_: expected norm_type > 0 with mesh, got 0.0",
        "scaler": "TypeError: clip_grad_norm_: expected mesh to be a DeviceMesh or a mapping from "
        "process groups to parameters, got int",
        "unchanged": "True",
    }
    for number, rank in enumerate(results):
        texts = dict(rank["refusals"])
        assert "got ProcessGroup; write {group: None}" in texts.pop("group")
        assert "expected each group once in mesh, got" in texts.pop("twice")
        assert "of a gradient's own mesh, whose norm is over it already" in texts.pop("own mesh")
        if number == len(results) - 1:
            assert "expected a group that this process is a member of" in texts.pop("outsider")
            assert "expected a mesh that this process is a member of" in texts.pop("outside mesh")
        assert texts == wanted
