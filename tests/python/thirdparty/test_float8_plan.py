# SPDX-License-Identifier: Apache-2.0
"""Plans of models of transformers and timm are what their runs do."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import nn

import fastamp
from support.float8 import float8_region

REASON = "the thirdparty extra is not installed"
SMALL = "K and N within small_size"
pytestmark = pytest.mark.filterwarnings("ignore")  # of many kinds

# Some layers run in fp8, some do not.
RECIPE = fastamp.float8.Recipe(small_size=(32, 32))


def gpt2(width: int = 32) -> nn.Module:
    library = pytest.importorskip("transformers", reason=REASON)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": width, "n_layer": 2, "n_head": 2}
    return library.GPT2LMHeadModel(library.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    library = pytest.importorskip("transformers", reason=REASON)
    config = library.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return library.LlamaForCausalLM(config)


def bert() -> nn.Module:
    library = pytest.importorskip("transformers", reason=REASON)
    config = library.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=3,
    )
    return library.BertForSequenceClassification(config)


def vit() -> nn.Module:
    timm = pytest.importorskip("timm", reason=REASON)
    options = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **options)


def tokens() -> dict[str, Any]:
    ids = torch.randint(0, 64, (2, 12))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("make", [gpt2, llama, bert, vit])
@pytest.mark.parametrize("training", [True, False])
def test_a_run_does_what_the_plan_says(make: Any, training: bool):
    model = make().train(training)
    inputs = (torch.randn(2, 3, 32, 32),) if make is vit else ()
    kwargs = {} if make is vit else tokens()
    plan = fastamp.float8.plan(model, *inputs, kwargs=kwargs, device="cpu", recipe=RECIPE)
    with fastamp.debug.trace() as trace, float8_region(float8=RECIPE):
        model(*inputs, **kwargs)
    planned: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for row in plan.rows:
        if row.x_dtype:
            planned[row.op, row.float8, row.x_dtype] += row.calls
    ran: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for traced in trace.rows:
        place = 1 if traced.op == "addmm" else 0
        if traced.float8 and traced.float8 not in ("not x times a weight", "dtype"):
            ran[traced.op, traced.float8, traced.inputs[place]] += traced.calls
    assert planned == ran
    assert {"float8", SMALL} <= {outcome for _, outcome, _ in ran}


@pytest.mark.parametrize("make", [gpt2, llama, bert, vit])
def test_plans_for_a_gpu_need_none(make: Any):
    model = make()
    inputs = (torch.randn(2, 3, 32, 32),) if make is vit else ()
    kwargs = {} if make is vit else tokens()
    plan = fastamp.float8.plan(model, *inputs, kwargs=kwargs)
    products = [row for row in plan.rows if row.x_dtype]
    assert {row.float8 for row in products} <= {
        SMALL,
        "K or N not a multiple of 16",
    }
    assert all(row.module for row in products)
    assert plan.saved_bytes == plan.base_dtype_saved_bytes


def test_a_tied_and_excluded_head_is_named_by_both_of_its_modules():
    model = gpt2()
    with fastamp.float8.exclude(model.lm_head):
        plan = fastamp.float8.plan(model, kwargs=tokens())
    rows = {row.module: row for row in plan.rows}
    head = rows["transformer.wte = lm_head"]
    assert (head.op, head.m, head.k, head.n, head.float8) == ("linear", 24, 32, 64, "excluded")
    attention = rows["transformer.h.0.attn.c_attn"]
    assert (attention.op, attention.k, attention.n) == ("addmm", 32, 96)


def test_a_large_model_on_meta_is_planned_layer_by_layer():
    with torch.device("meta"):
        model = gpt2(width=1600)
    ids = torch.empty(512, 16, dtype=torch.int64, device="meta")
    plan = fastamp.float8.plan(model, kwargs={"input_ids": ids})
    rows = {row.module: row for row in plan.rows}
    assert rows["transformer.h.1.mlp.c_fc"].float8 == "float8"
    assert rows["transformer.h.1.mlp.c_fc"].m == 8192
    assert rows["transformer.wte = lm_head"].float8 == SMALL
    assert plan.saved_bytes < plan.base_dtype_saved_bytes
