# SPDX-License-Identifier: Apache-2.0
"""Training compares like with like, on real data, and counts what it says."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

import fastamp
from benchmarks import data
from benchmarks.budget import Effort
from benchmarks.counts import profiled, saved_for_backward
from benchmarks.harness import BASELINE, FASTAMP, judge, measure, prepared
from benchmarks.models import digits, transformer, workloads
from benchmarks.rows.steps import transformer_shapes
from benchmarks.rows.training import training_row
from benchmarks.rows.weight_copies import NO_COPIES, copies_row
from benchmarks.sides import REGIONS, use_kernels_of
from benchmarks.training import FP32, Training, search


def test_a_row_trains_all_ways_to_nearly_the_same_loss():
    row = training_row(replace(digits(64), steps=60), "cpu", "bf16", None)
    found = measure(row, Effort(2, 1e-9, 0, 2, 0, 2))
    facts = found.facts
    assert set(facts) == {BASELINE, FASTAMP, FP32}
    assert facts[FASTAMP]["loss"] == facts[BASELINE]["loss"]  # the same bits all the way
    assert abs(facts[FASTAMP]["loss"] - facts[FP32]["loss"]) < 0.05
    assert facts[FASTAMP]["accuracy %"] > 80
    assert facts[FP32]["casts"] == 0 < facts[BASELINE]["casts"]
    assert facts[FASTAMP]["casts"] <= facts[BASELINE]["casts"]
    assert found.work == (64, "images")


def test_test_images_are_never_trained_on():
    train, test = data.images(8, 1), data.images(8, 1, test=True)
    assert len(train[1]) + len(test[1]) == 1797
    seen = torch.cat([x for x, _ in islice(data.image_batches(8, 1, 100, "cpu"), 30)]).flatten(1)
    assert len(seen.unique(dim=0)) == len(train[0].flatten(1).unique(dim=0))


def test_batches_are_the_same_every_time():
    for make in (
        lambda: data.image_batches(16, 3, 4, "cpu"),
        lambda: data.text_batches(8, 2, "cpu"),
        lambda: data.masked_batches(8, 2, "cpu"),
    ):
        first, second = list(islice(make(), 3)), list(islice(make(), 3))
        assert all(torch.equal(p[0], q[0]) for p, q in zip(first, second, strict=True))
        assert all(torch.equal(p[1], q[1]) for p, q in zip(first, second, strict=True))
        assert not torch.equal(first[0][0], first[1][0])


def test_targets_of_text_are_the_next_bytes_or_the_masked_ones():
    x, y = next(data.text_batches(20, 3, "cpu"))
    assert torch.equal(x[:, 1:], y[:, :-1])
    x, y = next(data.masked_batches(40, 3, "cpu"))
    assert ((x == data.MASK_TOKEN) == (y != data.IGNORED)).all()
    assert ((y >= 0).any(1)).all()


def test_profile_counts_casts_reads_and_memory():
    x = torch.randn(256, 1024)

    def step():
        return float((x.bfloat16().float() + 1).sum())

    step()
    counts = profiled(step, "cpu")
    assert counts["casts"] == 2
    assert counts["syncs"] == 1
    assert counts["MiB peak"] >= 1.5  # bf16 and fp32 copies at once
    assert 2.5 <= counts["MiB allocated"] < 3


def test_casts_of_weights_are_told_by_their_memory():
    w, x = torch.randn(8, 8), torch.randn(8, 8)
    tied = torch.nn.Parameter(w)

    def step():
        w.bfloat16(), w.t()[:4].half(), x.bfloat16()

    counts = profiled(step, "cpu", [tied])
    assert (counts["casts"], counts["weight casts"]) == (3, 2)
    assert profiled(step, "cpu")["weight casts"] == 0


@pytest.mark.usefixtures("nothing_is_kept_afterwards")
def test_a_row_with_weight_copies_says_what_they_save_and_hold():
    found = measure(copies_row(digits(16), "cpu"), Effort(2, 1e-9, 0, 2, 0, 2))
    facts = found.facts
    assert set(facts) == set(found.samples) == {BASELINE, FASTAMP, NO_COPIES}
    assert found.goal_reached
    assert {name: f["weight casts"] for name, f in facts.items()} == {
        BASELINE: 4,
        FASTAMP: 0,
        NO_COPIES: 4,
    }
    assert facts[NO_COPIES]["casts"] - facts[FASTAMP]["casts"] == 4
    parameters = 64 * 256 + 256 + 256 * 10 + 10
    held = {name: f["MiB kept between steps"] * 2**20 for name, f in facts.items()}
    assert held == {BASELINE: 0, FASTAMP: 2 * parameters, NO_COPIES: 0}
    found.facts[FASTAMP]["weight casts"] = 1.0
    judge(found, copies_row(digits(16), "cpu").goal)
    assert not found.goal_reached


@pytest.mark.usefixtures("nothing_is_kept_afterwards")
def test_taking_turns_with_torch_leaves_weight_copies_in_place():
    candidates = copies_row(digits(16), "cpu").candidates()
    for _ in range(2):
        for candidate in candidates.values():
            with prepared(candidate):
                candidate.names["step"]()
        step = candidates[FASTAMP].names["step"]
        with prepared(candidates[FASTAMP]), fastamp.debug.trace() as t:
            step()
        assert t.totals["weight_casts"] == 0 < t.totals["kept_hits"]


def test_casts_that_ops_share_count_once():
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(3)]
    x = torch.randn(512, 64, requires_grad=True)
    counts = {}
    for which, autocast in REGIONS.items():

        def step(autocast=autocast):
            y = x * 2
            with autocast("cpu", dtype=torch.bfloat16):
                sum(layer(y) for layer in layers)

        use_kernels_of(which)()
        try:
            step()
            counts[which] = profiled(step, "cpu")
        finally:
            use_kernels_of(FASTAMP)()
    torchs, own = counts[BASELINE], counts[FASTAMP]
    assert (torchs["casts"], own["casts"]) == (6, 4)
    assert torchs["Mi elements cast"] - own["Mi elements cast"] == 2 * 512 * 64 / 2**20
    assert torchs["MiB allocated"] - own["MiB allocated"] == pytest.approx(2 * 512 * 128 / 2**20)


def test_saved_memory_leaves_out_parameters_and_counts_shared_memory_once():
    layer = torch.nn.Linear(64, 64, bias=False)
    x = torch.randn(64, 64, requires_grad=True)
    one = saved_for_backward(lambda: layer(x), layer)
    assert one == 64 * 64 * 4 / 2**20
    assert saved_for_backward(lambda: layer(x) + layer(x), layer) == one


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 100, 129])
def test_search_finds_the_largest_batch_to_an_eighth(limit):
    found = search(lambda batch: batch <= limit)
    assert found <= limit < found + max(1, found // 8) + 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workloads_can_be_made(device):
    for package in ("timm", "torchvision", "transformers"):
        pytest.importorskip(package)
    for workload in workloads(device):
        with torch.device("meta"):
            model = workload.model()
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        if device == "cuda":
            assert millions > 10
        if workload.name.startswith("GPT-2 124M"):
            assert 124 < millions < 125


def test_parameter_lists_have_the_models_sizes():
    gpt2 = sum(torch.Size(s).numel() for s in transformer_shapes(12, 768, [50257, 1024]))
    assert gpt2 == 124_439_808
    assert len(transformer_shapes(12, 768, [50257, 1024])) == 148


@pytest.mark.parametrize("which", [BASELINE, FASTAMP, FP32])
def test_separate_projections_train_in_each_way(which):
    work = replace(workloads("cpu")[0], model=lambda: transformer(1, 16, 2))
    facts = Training(work, which, "cpu", torch.bfloat16).facts(steps=2)
    assert facts["steps"] == 2
    assert facts["loss"] > 0
    assert facts["MiB saved for backward"] > 0
