# SPDX-License-Identifier: Apache-2.0
"""The FLOPs that ``fastamp.debug.inspect`` counts, of every kind of product."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastamp

aten = torch.ops.aten


def inspected(compute, *, dtype=torch.bfloat16, enabled=True):
    """The report of a step that computes ``compute(weight)``."""
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.rand(16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            result = compute(model.weight)
        result.float().square().sum().backward()
        optimizer.step()

    return fastamp.debug.inspect(step, model, optimizer)


def flops(report, backward=False):
    return {row.op: row.flops for row in report.ops if row.flops and row.backward == backward}


def grouped(weight, *shapes, offsets=None):
    left, right = (torch.ones(*shape) * weight[0] for shape in shapes)
    offsets = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    return aten._grouped_mm(left, right, offsets)


def attention(weight, key_heads=4, **options):
    q = torch.rand(2, 4, 8, 16) * weight
    k, v = (torch.rand(2, key_heads, 6, 16) * weight for _ in range(2))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # Where there is a device it may be switched off.
        return nn.functional.scaled_dot_product_attention(q, k, v, **options)


SCORES = 2 * 4 * 8 * 6
PRODUCTS = {
    "tokens of experts": (
        lambda w: grouped(w, (8, 16), (2, 16, 4), offsets=[3, 8]),
        {"_grouped_mm": 2 * 8 * 16 * 4},
    ),
    "gradients of experts": (
        lambda w: grouped(w, (8, 16), (16, 4), offsets=[8, 16]),
        {"_grouped_mm": 2 * 8 * 16 * 4},
    ),
    "experts of equal sizes": (
        lambda w: grouped(w, (2, 8, 16), (2, 16, 4)),
        {"_grouped_mm": 2 * 2 * 8 * 16 * 4},
    ),
    "attention": (
        attention,
        {"_scaled_dot_product_flash_attention_for_cpu": SCORES * 2 * 32},
    ),
    "attention of fewer heads of keys": (
        lambda w: attention(w, key_heads=2, enable_gqa=True),
        {"_scaled_dot_product_flash_attention_for_cpu": SCORES * 2 * 32},
    ),
    "mv": (lambda w: torch.rand(4, 16) @ w, {"mv": 2 * 4 * 16}),
    "addmv": (lambda w: torch.addmv(torch.rand(4), torch.rand(4, 16), w), {"addmv": 2 * 4 * 16}),
    "dot": (lambda w: torch.rand(16) @ w, {"dot": 2 * 16}),
    "addr": (lambda w: torch.addr(torch.rand(4, 16), torch.rand(4), w), {"addr": 2 * 4 * 16}),
    "addbmm": (
        lambda w: torch.addbmm(torch.rand(3, 4), torch.rand(2, 3, 16) * w, torch.rand(2, 16, 4)),
        {"addbmm": 2 * 2 * 3 * 16 * 4},
    ),
    "conv_tbc": (
        lambda w: torch.conv_tbc(torch.rand(5, 2, 16) * w, torch.rand(3, 16, 4), torch.rand(4)),
        {"conv_tbc": 2 * (3 * 2 * 4) * 3 * 16},
    ),
}


@pytest.mark.parametrize(("compute", "expected"), PRODUCTS.values(), ids=PRODUCTS)
def test_each_product_is_counted(compute, expected):
    counted = flops(inspected(compute))
    assert {op.removesuffix(".default"): number for op, number in counted.items()} == expected


def test_backward_passes_of_products_are_counted():
    backward = flops(inspected(attention), backward=True)
    assert backward["_scaled_dot_product_flash_attention_for_cpu_backward"] == SCORES * 2 * 80
    assert (
        flops(inspected(PRODUCTS["tokens of experts"][0]), backward=True)["_grouped_mm"]
        == 2 * PRODUCTS["tokens of experts"][1]["_grouped_mm"]
    )


def test_a_recurrent_layer_is_counted_in_either_form():
    lstm = nn.LSTM(16, 8)
    tokens = 5 * 2
    forward = 2 * tokens * (4 * 8 * 16 + 4 * 8 * 8)
    for enabled in (True, False):
        try:
            with torch.autocast("cpu", enabled=enabled):
                lstm(torch.rand(5, 2, 16))
        except RuntimeError:  # torch has no bfloat16 LSTM on some CPUs.
            assert enabled
            continue
        report = inspected(lambda w: lstm(torch.rand(5, 2, 16) * w)[0], enabled=enabled)
        assert sum(flops(report).values()) == forward


def test_experts_that_stay_in_fp32_are_no_share_of_16_bits():
    report = inspected(lambda w: grouped(w, (8, 16), (2, 16, 4), offsets=[3, 8]))
    assert "0.0 % of the work of products in 16 bits" in str(report)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_without_gradients_are_counted(mode):
    def compute(weight):
        with mode():
            frozen = torch.rand(4, 3, 16) @ torch.rand(16, 8) + nn.Linear(16, 8)(torch.rand(3, 16))
        return weight * frozen.clone().sum()

    assert sum(flops(inspected(compute)).values()) == 2 * 4 * 3 * 16 * 8 + 2 * 3 * 16 * 8
